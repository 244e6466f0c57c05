"""`python -m perdure`: the same as `perdure`."""

from perdure.cli.commands import main

main()
