"""Time-outs and retry policies of the activities."""

from dataclasses import dataclass
from datetime import timedelta

from temporalio.common import RetryPolicy

from perdure.protocol.requests import CallRef


@dataclass(frozen=True)
class Policy:
    """Time-outs and retries of one activity."""

    start_to_close: timedelta
    heartbeat: timedelta | None
    retry: RetryPolicy


#: A model may take long to reply; the death of a worker is noticed by its missing heartbeat.
#: Ten attempts with growing pauses bridge two minutes without workers or without the database, as for tools.
#: Errors of a provider get fewer attempts (harness/model_call.py).
MODEL = Policy(
    start_to_close=timedelta(minutes=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(
        initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=30), maximum_attempts=10
    ),
)

#: Short work on the store between two steps. The store may be slow; the death of a worker is noticed fast.
SHORT = Policy(
    start_to_close=timedelta(seconds=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(
        initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10), maximum_attempts=30
    ),
)

#: Work that must succeed in the end, however long the store is unavailable: for example the end of a turn.
UNTIL_DONE = Policy(
    start_to_close=timedelta(seconds=30),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10)),
)

#: Calls that run at the same time if the step has no limit.
PARALLEL = 16

#: Time beside the tool's own limit: to read its arguments and to record its outcome.
_TOOL_OVERHEAD = timedelta(seconds=30)


def tool(call: CallRef) -> Policy:
    """The bounds that the tool declares. They are part of the call's reference, so replay needs no declaration."""
    return Policy(
        start_to_close=timedelta(seconds=call.timeout) + _TOOL_OVERHEAD,
        heartbeat=timedelta(seconds=call.heartbeat),
        retry=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=call.attempts,
        ),
    )
