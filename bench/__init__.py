"""Measures Perdure against the least that Temporal can do on the same machine: `python -m bench`."""
