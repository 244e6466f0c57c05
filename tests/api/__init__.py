"""The HTTP API: a real server over a real store; only Temporal is replaced."""
