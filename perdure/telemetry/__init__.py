"""Spans, metrics and logs.

Read `names` first, the names of all spans, attributes and metrics, then `spans`. `setup` configures OpenTelemetry from
its environment variables, `scrape` shows metrics to Prometheus, and `logs` configures logging. None of them sees
content of sessions but `content`, for destinations that an operator has chosen.
"""
