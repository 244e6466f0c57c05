"""Durable agent sessions in Python, on Temporal."""
