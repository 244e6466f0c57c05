"""Temporal's inside: what decides."""
