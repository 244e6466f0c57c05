"""Tool calls: what is offered (`toolbox`, `builtin`), whether a call may run (`approvals`), and running it (`call`).

`records` has the shapes in which requested calls and their outcomes are recorded.
`outcomes` makes what a tool returned into what is recorded and shown to the model.
`children` offers agents as tools, and starts, stops and collects the sessions that do their calls.
`program` runs a program of the model from stage to stage: `stubs` says what it may call, and `sandbox` is the process
in which it runs.
`budget` decides whether a model call may be made, and asks people as for a call; `prices` says what one costs.
"""
