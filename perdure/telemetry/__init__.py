"""Spans, metrics and logs. `spans` has the names of all spans, counters and attributes.

`setup` configures OpenTelemetry from its environment variables, `logs` configures logging. Neither sees content of
sessions.
"""
