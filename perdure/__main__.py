"""`python -m perdure`: the same as `perdure`."""

from perdure.cli import main

main()
