"""The PostgreSQL store, for more than one machine."""
