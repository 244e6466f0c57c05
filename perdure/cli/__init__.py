"""The command line.

`commands` parses the arguments, `serve` runs a worker or an API, `operator` has the operations on stores and
sessions, `deploy` those on builds. `project` makes a new project, `doctor` says what is wrong with a set-up, `trace`
where the time of a session has gone.

Each command imports its modules when it runs, so that `perdure --help` is fast.
"""
