"""Temporal's outside: what acts."""
