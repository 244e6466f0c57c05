"""Tool calls: what is offered (`toolbox`, `builtin`), whether a call may run (`approvals`), and running it (`call`).

`records` has the shapes in which requested calls and their outcomes are recorded.
`outcomes` makes what a tool returned into what is recorded and shown to the model.
`budget` decides whether a model call may be made, and asks people as for a call.
"""
