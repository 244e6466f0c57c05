"""Values that cross a process boundary: frozen, camelCase on the wire.

It imports nothing else of Perdure. Read `wire`, `deliveries`, `events`, `inputs`, `requests`.
"""
