"""The workflows: a driver for each session and a child workflow for each turn. They decide; activities act.

Read `session` (the driver), `turn`, `outcomes`, `policies`; `family` is what a driver does for other sessions, and
`versions` how it moves to another build. `patches` lists what keeps older runs replayable.
"""
