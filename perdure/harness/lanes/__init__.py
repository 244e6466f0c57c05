"""The lanes of a session: what one is told about the others."""
