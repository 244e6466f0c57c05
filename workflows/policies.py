"""Time-outs and retry policies of the activities."""

from dataclasses import dataclass, replace
from datetime import timedelta

from temporalio.common import RetryPolicy

from perdure.protocol.deliveries import Bounds
from perdure.protocol.requests import CallRef


@dataclass(frozen=True)
class Policy:
    """Time-outs and retries of one activity."""

    start_to_close: timedelta
    heartbeat: timedelta | None
    retry: RetryPolicy
    # Set if the number of attempts has no limit.
    schedule_to_close: timedelta | None = None


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

#: One try to deliver a callback, and a second one if the store is away.
CALL_BACK = Policy(
    start_to_close=timedelta(seconds=40),
    heartbeat=timedelta(seconds=5),
    retry=RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=2),
    schedule_to_close=timedelta(minutes=2),
)

#: Calls that run at the same time if the step has no limit.
PARALLEL = 16

#: Time beside the tool's own limit: to read its arguments and to record its outcome.
_TOOL_OVERHEAD = timedelta(seconds=30)


#: How long after its deadline a turn may still try to record its end, if only the deadline bounds its attempts.
_AFTER_DEADLINE = timedelta(minutes=10)


def model(bounds: Bounds) -> Policy:
    """The policy of a model call, with the number of attempts that the session was started with."""
    if bounds.attempts is None:
        return MODEL
    retry = replace(MODEL.retry, maximum_attempts=bounds.attempts)
    return replace(MODEL, retry=retry, schedule_to_close=_schedule_to_close(bounds, bounds.attempts))


def _schedule_to_close(bounds: Bounds | None, attempts: int) -> timedelta | None:
    if attempts > 0 or bounds is None or bounds.turn_seconds is None:
        return None
    return timedelta(seconds=bounds.turn_seconds) + _AFTER_DEADLINE


def tool(call: CallRef, bounds: Bounds | None = None) -> Policy:
    """The bounds that the tool declares. They are part of the call's reference, so replay needs no declaration."""
    return Policy(
        schedule_to_close=_schedule_to_close(bounds, call.attempts),
        start_to_close=timedelta(seconds=call.timeout) + _TOOL_OVERHEAD,
        heartbeat=timedelta(seconds=call.heartbeat),
        retry=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=call.attempts,
        ),
    )
