"""How many examples a property test tries: a few in `make test`, five times as many in `make chaos`."""

import os

_TIMES = int(os.environ.get("PERDURE_EXAMPLES", "1"))


def at_least(few: int) -> int:
    return few * _TIMES
