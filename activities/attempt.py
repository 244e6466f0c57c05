"""What every activity needs around its work: heartbeats, the number of the attempt, error translation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

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

#: After so many deaths of workers a step is not attempted at the same time as another such step of the same worker.
_SUSPICIOUS = 2
#: For how many seconds at most a step waits for another one.
_SUSPECT_PATIENCE = 60.0
_suspects: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 60.0


def current_attempt() -> Attempt:
    """The current attempt. Generations grow with the scheduled time, whichever worker runs the attempt."""
    info = activity.info()
    scheduled = info.current_attempt_scheduled_time
    return Attempt(info.attempt, generation=int(scheduled.timestamp() * 1_000_000), deaths=_deaths())


def _deaths() -> int:
    """How many attempts fell silent before this one, as far as the last heartbeat says. Older builds say nothing."""
    info = activity.info()
    if info.attempt == 1:
        return 0
    said = cast("Sequence[Mapping[str, int]]", info.heartbeat_details or [{}])[0]
    return said.get("deaths", 0) + (said.get("ended", 0) != info.attempt - 1)


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
    said = {"deaths": _deaths(), "ended": 0}
    beat = asyncio.create_task(_send_heartbeats(timeout.total_seconds() / 4, said))
    try:
        async with _one_suspect_at_a_time(said):
            yield
    except BaseException:
        said["ended"] = activity.info().attempt
        activity.heartbeat(dict(said))
        raise
    finally:
        beat.cancel()


@contextlib.asynccontextmanager
async def _one_suspect_at_a_time(said: dict[str, int]) -> AsyncGenerator[None]:
    """Separate steps that may have killed workers, so that the one that did is not the end of its neighbours."""
    info, lock = activity.info(), _suspects.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    suspect = said["deaths"] >= _SUSPICIOUS
    if suspect and lock.locked():
        # If the worker dies meanwhile, it was not this step.
        said["ended"] = info.attempt
        activity.heartbeat(dict(said))
    alone = suspect and await _acquired(lock)
    said["ended"] = 0
    if info.attempt > 1:
        # At once: the next attempt has to know of those before this one, even if this one dies soon.
        activity.heartbeat(dict(said))
    try:
        yield
    finally:
        if alone:
            lock.release()


async def _acquired(lock: asyncio.Lock) -> bool:
    longest = activity.info().start_to_close_timeout
    patience = min(_SUSPECT_PATIENCE, longest.total_seconds() / 4) if longest else _SUSPECT_PATIENCE
    try:
        # Not `wait_for`: it would let another task look at the lock before this one has it.
        async with asyncio.timeout(patience):
            return await lock.acquire()
    except TimeoutError:
        return False


async def _send_heartbeats(every: float, said: Mapping[str, int]) -> None:
    while True:
        # Sleep first: the server knows that the attempt has just begun, and most end before the first heartbeat is due.
        await asyncio.sleep(every)
        activity.heartbeat(dict(said))


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
