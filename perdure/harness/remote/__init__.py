"""Other servers: the calls that their agents do for a turn, and the callbacks of sessions that they have started.

It knows HTTP, and nothing of Temporal. Read `outbound`, then `callbacks` and `calls`.
"""
