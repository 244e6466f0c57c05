"""What Perdure says of its work: `spans` has the names of all spans, counters and attributes in one place.

`setup` switches OpenTelemetry on by its environment variables, `logs` configures logging. No content goes through here.
"""
