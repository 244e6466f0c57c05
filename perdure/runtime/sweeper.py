"""What an API does again and again: signal what was accepted and not signalled, and delete what is kept no longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import monotonic

from perdure.errors import NoDriver, NoWorker, Unavailable
from perdure.store.base import Store
from perdure.store.deliveries import Unsignalled
from perdure.store.lifecycle import Keep

from .signals import Signals

log = logging.getLogger("perdure.sessions")

_LONGEST = 3600.0
#: A cancel request is signalled more often: a driver that was rebuilt meanwhile has lost it.
_LONGEST_CANCEL = 30.0
_PAGE = 200
#: How many sessions are signalled at once, and after how many failed groups in a row Temporal counts as unreachable.
_AT_ONCE = 8
_FAILED_GROUPS = 3

#: Reports of attempts that one transaction deletes, and how many such transactions a sweep has.
_BATCH = 500
_BATCHES = 20


@dataclass(frozen=True)
class _Pause:
    """When a session is signalled again, and the pause after that. A change of `about` ends the pause."""

    about: Unsignalled
    until: float
    length: float


class Sweeper:
    """Signals sessions again. Several may run at once: a driver ignores an id that it knows."""

    def __init__(
        self,
        store: Store,
        signals: Signals,
        *,
        every: float = 5.0,
        older_than: float = 5.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._signals = signals
        self._every = every
        self._older_than = older_than
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}
        # The deliveries that each session's driver has, as far as known: signalled by us or named in its answer. A run
        # accepts at most 10,000 signals, so none is sent twice without need.
        self._signalled: dict[str, set[str]] = {}
        # How many drivers did not answer a query in this sweep. Each such query takes seconds.
        self._unanswered = 0
        # The sessions whose readers know that no worker of their build runs.
        self._attended: set[str] = set()
        # Where the next sweep begins.
        self._after = ""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sweep repeatedly while this context is open."""
        return repeating(
            self.sweep,
            (self._every * 0.8, self._every * 1.2),
            away="the store cannot be searched for sessions to signal",
            failed="the sweep failed",
        )

    async def sweep(self) -> None:
        """Signal once every session that may lack something. A failure of one does not stop the others."""
        seen: set[str] = set()
        self._unanswered = 0
        if self._signals.unserved:
            await self._signals.find_unserved()
        # Start after the sessions that failed the last time, in case only these fail; then from the beginning.
        for begin in dict.fromkeys((self._after, "")):
            if not await self._sweep_from(begin, seen):
                return
        self._after = ""
        self._attended &= self._signals.unserved.keys()
        self._pauses = {each: pause for each, pause in self._pauses.items() if each in seen}
        self._signalled = {each: signalled for each, signalled in self._signalled.items() if each in seen}

    async def _sweep_from(self, after: str, seen: set[str]) -> bool:
        """Signal the sessions that were not seen in this sweep, by page; False when Temporal seems unreachable."""
        while page := await self._store.unsignalled(older_than=self._older_than, after=after, limit=_PAGE):
            after = page[-1].session_id
            new = [each for each in page if each.session_id not in seen]
            if not new:
                return True
            seen.update(each.session_id for each in new)
            if not await self._signal([each for each in new if self._due(each) or self._is_unserved(each)]):
                return False
        return True

    async def _signal(self, sessions: Sequence[Unsignalled]) -> bool:
        """Signal sessions in groups; False when Temporal seems unreachable."""
        failed = 0
        for start in range(0, len(sessions), _AT_ONCE):
            some = sessions[start : start + _AT_ONCE]
            reached = await asyncio.gather(*(self._signal_one(each) for each in some))
            failed = 0 if any(reached) else failed + 1
            if failed >= _FAILED_GROUPS:
                for each in sessions[start + _AT_ONCE :]:
                    self._pauses.pop(each.session_id, None)
                self._after = some[-1].session_id
                log.warning("Temporal cannot be reached; waiting deliveries are signalled later")
                return False
        return True

    async def _signal_one(self, session: Unsignalled) -> bool:
        """Signal one session; False when Temporal could not be reached."""
        session_id = session.session_id
        signalled = self._signalled.setdefault(session_id, set())
        try:
            if session_id in self._signals.unserved:
                # No query: nobody would answer.
                await self._signals.attend_unserved(session_id)
                self._attended.add(session_id)
            # A session whose signal has failed has waited long enough: it is signalled without a query.
            elif not session.failed:
                await self._query_driver(session_id, signalled)
            await self._signals.signal_all(session_id, signalled)
        except NoWorker:
            # Temporal is reachable, and other sessions may have workers.
            self._pauses.pop(session_id, None)
        except Unavailable:
            # Try again in the next sweep, without a pause.
            self._pauses.pop(session_id, None)
            return False
        except Exception:
            log.exception("session %s could not be signalled", session_id)
        return True

    async def _query_driver(self, session_id: str, signalled: set[str]) -> None:
        """Query which deliveries the driver has. Without an answer, those that were signalled count."""
        if self._unanswered >= _AT_ONCE:
            # Too many drivers do not answer: skip the query and signal what this process has not signalled.
            return
        try:
            view = await self._signals.describe(session_id)
        except NoDriver:
            # A driver that is started next has none of the signals.
            signalled.clear()
            return
        if view is None:
            self._unanswered += 1
            return
        signalled.clear()
        signalled.update(view.holds)

    def _is_unserved(self, session: Unsignalled) -> bool:
        """Whether the session waits for a worker of its build, and that is not known to its readers yet."""
        return session.session_id in self._signals.unserved and session.session_id not in self._attended

    def _due(self, session: Unsignalled) -> bool:
        now = self._clock()
        known = self._pauses.get(session.session_id)
        if known is None or known.about != session:
            known = _Pause(session, now, self._every)
        if now < known.until and not session.failed:
            return False
        longest = _LONGEST if session.cancel_turn is None else _LONGEST_CANCEL
        self._pauses[session.session_id] = _Pause(session, now + known.length, min(longest, known.length * 2))
        return True


class Retention:
    """Deletes what is no longer to be kept, some sessions at a time. Several may run at once."""

    def __init__(
        self, store: Store, keep: Keep, attempts: float | None = None, *, every: float = 10.0, sessions: int = 200
    ) -> None:
        """`attempts`: for how many seconds reports of attempts are kept."""
        self._attempts = attempts
        self._store = store
        self._keep = keep
        self._every = every
        self._sessions = sessions
        # Where the next sweep begins; None: with the oldest session.
        self._cursor: str | None = None

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sweep repeatedly while this context is open; without anything to delete, do nothing."""
        if self._keep.shortest is None and self._attempts is None:
            return contextlib.nullcontext()
        return repeating(
            self.sweep,
            (self._every * 0.5, self._every * 1.5),
            away="old content cannot be deleted now",
            failed="old content could not be deleted",
        )

    async def sweep(self) -> bool:
        """Delete what is old of the next sessions; False when those were the last ones."""
        if self._attempts is not None:
            await self._forget_attempts(self._attempts)
        self._cursor = await self._store.expire(self._keep, self._cursor, self._sessions)
        return self._cursor is not None

    async def _forget_attempts(self, older_than: float) -> None:
        for _ in range(_BATCHES):
            if await self._store.attempts.forget(older_than, _BATCH) < _BATCH:
                return


@contextlib.asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[object]], between: tuple[float, float], *, away: str, failed: str
) -> AsyncGenerator[None]:
    """Repeat the work while this context is open, after random pauses, so that processes do not all work at once.

    `away` and `failed`: the log lines when the store or Temporal is not reachable, and for any other failure.
    """
    task = asyncio.create_task(_repeat(work, between, away, failed))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _repeat(work: Callable[[], Awaitable[object]], between: tuple[float, float], away: str, failed: str) -> None:
    while True:
        await asyncio.sleep(random.uniform(*between))
        try:
            await work()
        except Unavailable as error:
            log.warning("%s: %s", away, error.message)
        except Exception:
            # A bug must not end the loop.
            log.exception("%s; it will be tried again", failed)
