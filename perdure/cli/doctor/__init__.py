"""`perdure doctor`: whether this machine, Temporal, the store and the agents are as a worker and an API need them.

Read `command`, which runs the probes, then `machine`, `servers` and `agents`, which have them.
No probe writes anything, and none is waited for longer than its time.
"""
