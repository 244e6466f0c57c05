"""The operations on sessions from outside: start, deliver, answer, cancel, read, fork, export and delete.

The only package of the core that uses a Temporal client. Every write goes to the store first; the workflow is signalled
after that. Read `open`, `sessions`, `inputs`, `signals`, `drivers`, then what repairs: `sweeper` and `reconciler`.
"""
