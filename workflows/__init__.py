"""The workflows: a driver for each session and a child workflow for each turn. They decide; activities act.

Read `session` (the driver), `turn`, `steps`, `policies`. `patches` lists what keeps older runs replayable.
"""
