"""What every activity needs around its work: heartbeats, the number of the attempt, error translation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.errors import NeedsAttention, PerdureError, TokenConflict, ToolFailed, TurnCancelled
from perdure.protocol import names
from perdure.protocol.requests import Coordinates, ModelCall, ToolCall
from perdure.protocol.runs import RunBody
from perdure.store.attempts import AttemptKey
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
#: For how many seconds at most a step waits for another one: less than what a tool has on top of its own time-out.
_SUSPECT_PATIENCE = 20.0
#: Seconds between two notes in the store that an attempt lives.
_RENEWAL = 5.0
#: Seconds within which a heartbeat is sent.
_BEAT = 1.0
_suspects: WeakKeyDictionary[asyncio.AbstractEventLoop, _Suspects] = WeakKeyDictionary()

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 60.0


def current_attempt(worker: str = "") -> Attempt:
    """The current attempt. Generations grow with the scheduled time, whichever worker runs the attempt."""
    info = activity.info()
    lease = None if info.heartbeat_timeout is None else time.time() + info.heartbeat_timeout.total_seconds()
    return Attempt(info.attempt, _generation(), deaths=_deaths(), worker=worker, lease_until=lease)


def _generation() -> int:
    return int(activity.info().current_attempt_scheduled_time.timestamp() * 1_000_000)


def _deaths() -> int:
    """How many attempts fell silent before this one, as far as the last heartbeat says.

    Older builds say nothing, and neither does a first attempt that dies early: then the one before counts once.
    """
    info = activity.info()
    if not info.heartbeat_details:
        return int(info.attempt == 2)
    said = cast("Sequence[Mapping[str, int]]", info.heartbeat_details)[0]
    return said.get("deaths", 0) + (not said.get("ended", False))


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
#: Notes that the lease of the attempt expires in so many seconds.
Renew: TypeAlias = Callable[[float], Awaitable[None]]


def attempted(*, reports: bool = False) -> Callable[[Work[S, A, R]], Work[S, A, R]]:
    """Wrap an activity in `attempt`; with `reports`, the session's attention is set when no worker can do the work."""

    def decorate(work: Work[S, A, R]) -> Work[S, A, R]:
        @functools.wraps(work)
        async def run(self: S, argument: A) -> R:
            async def report(error: NeedsAttention) -> None:
                await self.harness.report(_session_of(argument), error)

            async with attempt(report if reports else None, _renewal(self.harness, argument)):
                return await work(self, argument)

        return run

    return decorate


def _renewal(harness: Harness, argument: _TurnArgument | _SessionArgument) -> Renew | None:
    """How the lease is renewed that the report of this attempt shows; None: this work has no such report."""
    match argument:
        case ModelCall(at=at):
            key = AttemptKey(at.turn, at.step, names.MODEL_SCOPE, _generation())
        case ToolCall(at=at, call=call):
            key = AttemptKey(at.turn, at.step, names.call_scope(call.call_id), _generation())
        case RunBody():
            key = AttemptKey(0, 0, names.BODY_SCOPE, _generation())
        case _:
            return None
    session_id = _session_of(argument)
    return lambda seconds: harness.renew(session_id, key, seconds)


def _session_of(argument: _TurnArgument | _SessionArgument) -> str:
    at = getattr(argument, "at", None)
    return at.session_id if isinstance(at, Coordinates) else cast("_SessionArgument", argument).session_id


@contextlib.asynccontextmanager
async def attempt(
    attend: Callable[[NeedsAttention], Awaitable[object]] | None = None, renew: Renew | None = None
) -> AsyncGenerator[None]:
    """Send heartbeats while the work runs, and raise its errors as Temporal's, with codes and ids only.

    `attend` is called when no worker can do the work, possibly often: the driver retries until one can.
    """
    # Always `from None`: Temporal would store the texts of the causes, which may hold content.
    try:
        async with _heartbeating(renew):
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
async def _heartbeating(renew: Renew | None) -> AsyncGenerator[None]:
    """Send heartbeats until the work is done, so that the death of this worker is noticed."""
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    said = {"deaths": _deaths(), "ended": False}
    sent = _Sent(asyncio.get_running_loop().time())
    tasks = [asyncio.create_task(_send_heartbeats(timeout.total_seconds() / 4, said, sent))]
    if renew is not None:
        # Apart from the heartbeats: a database that is away must not delay them.
        tasks.append(asyncio.create_task(_renew_lease(renew, timeout.total_seconds(), sent)))
    try:
        async with _one_suspect_at_a_time(said):
            yield
    except BaseException:
        said["ended"] = True
        activity.heartbeat(dict(said))
        raise
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _one_suspect_at_a_time(said: dict[str, int]) -> AsyncGenerator[None]:
    """Separate steps that may have killed workers, so that the one that did is not the end of its neighbours."""
    suspects = _suspects.setdefault(asyncio.get_running_loop(), _Suspects())
    waited = alone = False
    if said["deaths"] >= _SUSPICIOUS:
        waited = suspects.lock.locked()
        alone = await suspects.let_in(said)
    try:
        if activity.info().attempt > 1:
            # At once: the next attempt has to know of those before this one, even if this one dies soon.
            activity.heartbeat(dict(said))
        if waited:
            # Heartbeats are sent once a second, and the last one says that this step waits.
            await asyncio.sleep(_BEAT)
        yield
    finally:
        if alone:
            suspects.lock.release()


class _Suspects:
    """The steps of this worker that have lost two workers already."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        # What the one that runs says in its heartbeats.
        self._running: dict[str, int] = {}

    async def let_in(self, said: dict[str, int]) -> bool:
        """Wait until no other one runs, and say so; False if that takes too long."""
        if self.lock.locked():
            # If the worker dies meanwhile, it was not this step.
            said["ended"] = True
            activity.heartbeat(dict(said))
        longest = activity.info().start_to_close_timeout
        patience = min(_SUSPECT_PATIENCE, longest.total_seconds() / 4) if longest else _SUSPECT_PATIENCE
        try:
            # Not `wait_for`: it would let another task look at the lock before this one has it.
            async with asyncio.timeout(patience):
                alone = await self.lock.acquire()
            self._running = said
        except TimeoutError:
            alone = False
            # The one that runs has lived long enough: if the worker dies now, it was not that one.
            self._running["ended"] = True
        said["ended"] = False
        return alone


@dataclass
class _Sent:
    """When the last heartbeat was sent, by the clock of the event loop."""

    at: float


async def _send_heartbeats(every: float, said: Mapping[str, int], sent: _Sent) -> None:
    while True:
        # Sleep first: the server knows that the attempt has just begun, and most end before the first heartbeat is due.
        await asyncio.sleep(every)
        activity.heartbeat(dict(said))
        sent.at = asyncio.get_running_loop().time()


async def _renew_lease(renew: Renew, lease: float, sent: _Sent) -> None:
    """Note in the store that this attempt lives, as far as Temporal knows. Attempts that end soon are never noted."""
    await asyncio.sleep(lease)
    while True:
        left = lease - (asyncio.get_running_loop().time() - sent.at)
        try:
            async with asyncio.timeout(_RENEWAL):
                await renew(left)
        except Exception as error:
            # Only a report: it says that the lease has expired until this succeeds.
            log.debug("the lease of %s was not renewed: %s", activity.info().workflow_id, type(error).__name__)
        await asyncio.sleep(max(_RENEWAL, lease / 4))


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
    if info.workflow_type == names.SESSION_WORKFLOW and info.activity_type not in names.STEPS:
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
