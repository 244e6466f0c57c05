"""What the workflow of a run carries: ids and times, and never its input."""

from perdure.protocol.requests import Failure
from perdure.protocol.wire import Versioned, Wire


class RunState(Versioned, extra="allow"):
    """The argument of the workflow. What newer builds add is kept."""

    run_id: str
    # An operator has ended it.
    ends: Failure | None = None


class RunBody(Versioned):
    """Input of `run_body`: enter the function of the run, or end the run with this failure."""

    session_id: str
    ends: Failure | None = None


class RunLooked(Wire):
    """What has become of the run: it has ended, or it waits."""

    ended: bool = False
    # When to look again, in seconds since the epoch; None: when something is delivered.
    due: float | None = None
