"""The state of a session and the decisions about it. Pure: no clock, no I/O, no Temporal.

Read `state` first, then `decisions` (the driver) and `turn` (one turn); `inputs` holds the rules for answers,
`children` what changes when a turn hands work to other sessions, `remote` what is known of a call on another server,
and `view` what programs outside read of a driver.
"""
