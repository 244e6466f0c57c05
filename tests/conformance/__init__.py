"""Clients of other people, unmodified, against the whole product."""
