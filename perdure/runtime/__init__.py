"""What a trusted process holds: sessions are started, delivered to, answered, cancelled and looked at here.

The only package of the core that knows a Temporal client. Every write goes to the store first, and Temporal is told
after that. Read `open`, `sessions`, `inputs`, `signals`, `driver`, then what repairs: `sweeper` and `reconciler`.
"""
