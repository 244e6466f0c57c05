"""The store for more than one machine."""
