"""Versioned workers: what `perdure deploy` shows and does, over Temporal's own API.

It knows builds, workflows and task queues, and neither the store nor what a session says.
Read `builds`, then `switch` and `drain`. `unserved` tells the APIs which sessions no worker can continue.
"""
