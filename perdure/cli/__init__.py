"""The command line.

`commands` reads words and options, `serve` runs a worker or an API, `operator` looks after sessions.

Each command imports what it needs when it runs, so that `perdure --help` is quick.
"""
