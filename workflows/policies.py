"""How long things may take and how often they are tried."""

from dataclasses import dataclass
from datetime import timedelta

from temporalio.common import RetryPolicy

from perdure.protocol.requests import CallRef


@dataclass(frozen=True)
class Policy:
    """The bounds of one activity."""

    start_to_close: timedelta
    heartbeat: timedelta | None
    retry: RetryPolicy


#: A model may think for a long time, but a worker that falls silent is noticed within the heartbeat.
#: Ten tries with growing pauses outlast two minutes in which workers die, or without a database; so do those of a tool.
#: A provider has fewer (harness/model_step.py).
MODEL = Policy(
    start_to_close=timedelta(minutes=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(
        initial_interval=timedelta(milliseconds=500),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=30),
        maximum_attempts=10,
    ),
)

#: Short work on the store between two steps. The store may take long over it; a dead worker must not.
SHORT = Policy(
    start_to_close=timedelta(seconds=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(
        initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10), maximum_attempts=30
    ),
)

#: The last word on a turn or a delivery is said in the end, however long the store is away.
UNTIL_DONE = Policy(
    start_to_close=timedelta(seconds=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10)),
)

#: Calls that run at the same time when the step does not say how many.
PARALLEL = 16

#: What a tool's own time limit does not cover: finding the arguments, recording the outcome.
_ROUND_TOOL = timedelta(seconds=30)


def tool(call: CallRef) -> Policy:
    """As the tool's declaration says; the call reference carries it, so replay never looks at the declaration."""
    return Policy(
        start_to_close=timedelta(seconds=call.timeout) + _ROUND_TOOL,
        heartbeat=timedelta(seconds=call.heartbeat),
        retry=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            backoff_coefficient=2.0,
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=call.attempts,
        ),
    )
