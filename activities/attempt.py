"""What every activity does around its work: send heartbeats, number its attempt, translate its errors."""

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

#: A worker that cannot serve a session hands it back at once, this often: others get their turn within a few seconds.
#: Then the turn is held by its driver, which starts it again later.
HANDED_BACK = 6

#: The SDK logs a traceback of every failure but these: a cancel is none, and what a tool raised is in our log.
_ORDINARY = (TurnCancelled, ToolFailed)
_UNSPECIFIED = ApplicationErrorCategory.UNSPECIFIED

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 60.0


def current() -> Attempt:
    """This attempt. A later one was scheduled later, whichever worker runs it."""
    info = activity.info()
    scheduled = info.current_attempt_scheduled_time
    return Attempt(number=info.attempt, generation=int(scheduled.timestamp() * 1_000_000))


class _OfTurn(Protocol):
    @property
    def at(self) -> Coordinates: ...


class _OfSession(Protocol):
    @property
    def session_id(self) -> str: ...


class _Activities(Protocol):
    harness: Harness


S = TypeVar("S", bound=_Activities)
A = TypeVar("A", bound=_OfTurn | _OfSession)
R = TypeVar("R")
Work = Callable[[S, A], Awaitable[R]]


def attempted(*, reports: bool = False) -> Callable[[Work[S, A, R]], Work[S, A, R]]:
    """Do around an activity's work what each of them needs; with `reports`, tell when no worker can do it."""

    def decorate(work: Work[S, A, R]) -> Work[S, A, R]:
        @functools.wraps(work)
        async def run(self: S, argument: A) -> R:
            async def report(error: NeedsAttention) -> None:
                await self.harness.report(_session_of(argument), error)

            async with attempt(report if reports else None):
                return await work(self, argument)

        return run

    return decorate


def _session_of(argument: _OfTurn | _OfSession) -> str:
    at = getattr(argument, "at", None)
    return at.session_id if isinstance(at, Coordinates) else cast("_OfSession", argument).session_id


@contextlib.asynccontextmanager
async def attempt(attend: Callable[[NeedsAttention], Awaitable[object]] | None = None) -> AsyncGenerator[None]:
    """Heartbeat while the work is done, and tell the engine of errors in its own terms: by codes and ids.

    `attend` is told when no worker can do the work; the driver waits for as long as that takes. It may be told often.
    """
    # `from None`, always: the engine would keep the texts of all that an error was caused by.
    try:
        async with _beating():
            yield
    except NeedsAttention as error:
        if attend is not None and activity.info().attempt >= HANDED_BACK:
            await attend(error)
        raise _application_error(error) from None
    except PerdureError as error:
        raise _application_error(error) from None
    # An author's code that exits must not take the worker along, wherever it is called from.
    except (Exception, SystemExit) as error:
        raise _unexpected(error) from None


@contextlib.asynccontextmanager
async def _beating() -> AsyncGenerator[None]:
    """Heartbeat until the work is done; without it the death of this worker goes unnoticed."""
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    beat = asyncio.create_task(_beat(timeout.total_seconds() / 4))
    try:
        yield
    finally:
        beat.cancel()


async def _beat(every: float) -> None:
    while True:
        # The attempt has just begun, which the server knows: most end before there is anything to say.
        await asyncio.sleep(every)
        activity.heartbeat()


def _application_error(error: PerdureError) -> ApplicationError:
    """Our error as the engine understands it: by type, with or without another try."""
    message, details = error.bare()
    return ApplicationError(
        message,
        {
            "details": details,
            "structural": isinstance(error, TokenConflict),
            "held": isinstance(error, NeedsAttention),
        },
        type=error.code,
        non_retryable=not _again(error),
        next_retry_delay=_pause(error),
        category=ApplicationErrorCategory.BENIGN if isinstance(error, _ORDINARY) else _UNSPECIFIED,
    )


def _unexpected(error: BaseException) -> ApplicationError:
    """Any other error: its text may be anything, so it stands in our log and nowhere else."""
    info, error_id = activity.info(), str(uuid4())
    log.error("%s of %s failed, error id %s", info.activity_type, info.workflow_id, error_id, exc_info=error)
    return ApplicationError(
        "The work failed unexpectedly; the worker's log has the rest under this id.",
        {"details": {"errorId": error_id}},
        type=type(error).__name__,
    )


def _again(error: PerdureError) -> bool:
    info = activity.info()
    if info.workflow_type == names.SESSION_WORKFLOW:
        # A driver has nobody to report a failure to: it waits until the work can be done.
        return True
    if isinstance(error, NeedsAttention):
        return info.attempt < HANDED_BACK
    return bool(getattr(error, "transient", error.retryable))


def _pause(error: PerdureError) -> timedelta | None:
    if isinstance(error, NeedsAttention):
        seconds: float | None = min(_FIRST_PAUSE * 2 ** min(activity.info().attempt - 1, 16), _LONGEST_PAUSE)
    else:
        seconds = getattr(error, "retry_after", None)
    return None if seconds is None else timedelta(seconds=min(seconds, 300.0))
