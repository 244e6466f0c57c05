"""`perdure dev`: everything on one machine, for development.

Read `machine`, then `supervisor`, `reload`, `program` and `temporal_server`.

Nothing that runs in production imports this package.
"""
