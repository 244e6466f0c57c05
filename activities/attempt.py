"""What every activity needs around its work: heartbeats, the number of the attempt, error translation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from uuid import uuid4

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.errors import NeedsAttention, PerdureError, TokenConflict, ToolFailed, TurnCancelled
from perdure.protocol import names
from perdure.protocol.requests import Coordinates
from perdure.store.values import Attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness

log = logging.getLogger("perdure.activities")

#: Attempts in which a worker that cannot serve a session returns the work at once, so that another one may try.
#: After the last one the driver holds the turn and starts it again later.
HANDED_BACK = 6

#: Failures for which the SDK logs no traceback: a cancellation is no error, and a tool's error is in our own log.
_EXPECTED = (TurnCancelled, ToolFailed)
_UNSPECIFIED = ApplicationErrorCategory.UNSPECIFIED

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 60.0


def current_attempt() -> Attempt:
    """The current attempt. Generations grow with the scheduled time, whichever worker runs the attempt."""
    info = activity.info()
    scheduled = info.current_attempt_scheduled_time
    return Attempt(number=info.attempt, generation=int(scheduled.timestamp() * 1_000_000))


class _TurnArgument(Protocol):
    @property
    def at(self) -> Coordinates: ...


class _SessionArgument(Protocol):
    @property
    def session_id(self) -> str: ...


class _Activities(Protocol):
    harness: Harness


S = TypeVar("S", bound=_Activities)
A = TypeVar("A", bound=_TurnArgument | _SessionArgument)
R = TypeVar("R")
Work = Callable[[S, A], Awaitable[R]]


def attempted(*, reports: bool = False) -> Callable[[Work[S, A, R]], Work[S, A, R]]:
    """Wrap an activity in `attempt`; with `reports`, the session's attention is set when no worker can do the work."""

    def decorate(work: Work[S, A, R]) -> Work[S, A, R]:
        @functools.wraps(work)
        async def run(self: S, argument: A) -> R:
            async def report(error: NeedsAttention) -> None:
                await self.harness.report(_session_of(argument), error)

            async with attempt(report if reports else None):
                return await work(self, argument)

        return run

    return decorate


def _session_of(argument: _TurnArgument | _SessionArgument) -> str:
    at = getattr(argument, "at", None)
    return at.session_id if isinstance(at, Coordinates) else cast("_SessionArgument", argument).session_id


@contextlib.asynccontextmanager
async def attempt(attend: Callable[[NeedsAttention], Awaitable[object]] | None = None) -> AsyncGenerator[None]:
    """Send heartbeats while the work runs, and raise its errors as Temporal's, with codes and ids only.

    `attend` is called when no worker can do the work, possibly often: the driver retries until one can.
    """
    # Always `from None`: Temporal would store the texts of the causes, which may hold content.
    try:
        async with _heartbeating():
            yield
    except NeedsAttention as error:
        if attend is not None and activity.info().attempt >= HANDED_BACK:
            await attend(error)
        raise _application_error(error) from None
    except PerdureError as error:
        raise _application_error(error) from None
    # SystemExit too: an author's code must not be able to end the worker.
    except (Exception, SystemExit) as error:
        raise _unexpected(error) from None


@contextlib.asynccontextmanager
async def _heartbeating() -> AsyncGenerator[None]:
    """Send heartbeats until the work is done, so that the death of this worker is noticed."""
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    beat = asyncio.create_task(_send_heartbeats(timeout.total_seconds() / 4))
    try:
        yield
    finally:
        beat.cancel()


async def _send_heartbeats(every: float) -> None:
    while True:
        # Sleep first: the server knows that the attempt has just begun, and most end before the first heartbeat is due.
        await asyncio.sleep(every)
        activity.heartbeat()


def _application_error(error: PerdureError) -> ApplicationError:
    """Our error as Temporal's: with its code as type, retryable or not."""
    message, details = error.bare()
    return ApplicationError(
        message,
        {
            "details": details,
            "structural": isinstance(error, TokenConflict),
            "held": isinstance(error, NeedsAttention),
        },
        type=error.code,
        non_retryable=not _is_retryable(error),
        next_retry_delay=_retry_delay(error),
        category=ApplicationErrorCategory.BENIGN if isinstance(error, _EXPECTED) else _UNSPECIFIED,
    )


def _unexpected(error: BaseException) -> ApplicationError:
    """Any other error. Its text may hold content, so it is written to the worker's log only."""
    info, error_id = activity.info(), str(uuid4())
    log.error("%s of %s failed, error id %s", info.activity_type, info.workflow_id, error_id, exc_info=error)
    return ApplicationError(
        "The work failed unexpectedly; the worker's log has the rest under this id.",
        {"details": {"errorId": error_id}},
        type=type(error).__name__,
    )


def _is_retryable(error: PerdureError) -> bool:
    info = activity.info()
    if info.workflow_type == names.SESSION_WORKFLOW:
        # A driver cannot continue without this work, so it is retried until it succeeds.
        return True
    if isinstance(error, NeedsAttention):
        return info.attempt < HANDED_BACK
    return bool(getattr(error, "transient", error.retryable))


def _retry_delay(error: PerdureError) -> timedelta | None:
    if isinstance(error, NeedsAttention):
        seconds: float | None = min(_FIRST_PAUSE * 2 ** min(activity.info().attempt - 1, 16), _LONGEST_PAUSE)
    else:
        seconds = getattr(error, "retry_after", None)
    return None if seconds is None else timedelta(seconds=min(seconds, 300.0))
