"""Tells sessions what nobody has told them: whoever accepted it died, or found Temporal away."""

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
from perdure.store.values import Untold

from .signals import Signals

log = logging.getLogger("perdure.sessions")

_LONGEST = 3600.0
#: A wish to stop a turn is looked after more often: a driver may have come to read its state since, and lost the wish.
_LONGEST_WISH = 30.0
_PAGE = 200
#: How many sessions are told at once, and how many such groups may fail in a row before Temporal is taken to be away.
_AT_ONCE = 8
_FAILED_GROUPS = 3


@dataclass(frozen=True)
class _Pause:
    """When a session is told the same again, and how long to wait after that. News of it ends the pause."""

    about: Untold
    until: float
    length: float


class Sweeper:
    """Tells sessions again. Any number may run at once: a driver reads an id once."""

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
        # What each session's driver holds, as far as we know: what it was told, or has named when it was asked. Each
        # signal stays in the session's history, and a run takes 10,000, so nothing is told twice without need.
        self._told: dict[str, set[str]] = {}
        # How many drivers did not answer in this sweep: each question to one of them takes seconds.
        self._silent = 0
        # Where the next sweep begins.
        self._after = ""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sweep now and then, for as long as this is open."""
        return repeating(
            self.sweep,
            (self._every * 0.8, self._every * 1.2),
            away="the store cannot be searched for what was not told",
            failed="the sweep failed",
        )

    async def sweep(self) -> None:
        """Tell every session once that may not know everything. One that fails stops none of the others."""
        seen: set[str] = set()
        self._silent = 0
        # Behind those that failed the last time, because they may be the only ones that do; then from the beginning.
        for begin in dict.fromkeys((self._after, "")):
            if not await self._sweep_from(begin, seen):
                return
        self._after = ""
        self._pauses = {each: pause for each, pause in self._pauses.items() if each in seen}
        self._told = {each: told for each, told in self._told.items() if each in seen}

    async def _sweep_from(self, after: str, seen: set[str]) -> bool:
        """Tell what was not seen yet, page by page; False when it looks as if Temporal were away."""
        while page := await self._store.untold(older_than=self._older_than, after=after, limit=_PAGE):
            after = page[-1].session_id
            new = [each for each in page if each.session_id not in seen]
            if not new:
                return True
            seen.update(each.session_id for each in new)
            if not await self._tell([each for each in new if self._due(each)]):
                return False
        return True

    async def _tell(self, sessions: Sequence[Untold]) -> bool:
        """Tell some sessions at a time; False when it looks as if Temporal were away."""
        failed = 0
        for start in range(0, len(sessions), _AT_ONCE):
            some = sessions[start : start + _AT_ONCE]
            told = await asyncio.gather(*(self._tell_one(each) for each in some))
            failed = 0 if any(told) else failed + 1
            if failed >= _FAILED_GROUPS:
                for each in sessions[start + _AT_ONCE :]:
                    self._pauses.pop(each.session_id, None)
                self._after = some[-1].session_id
                log.warning("Temporal cannot be reached; what was accepted is told later")
                return False
        return True

    async def _tell_one(self, untold: Untold) -> bool:
        session_id = untold.session_id
        told = self._told.setdefault(session_id, set())
        try:
            # Whom Temporal could not be told of before is not asked first: it waits long enough.
            if not untold.failed:
                await self._ask(session_id, told)
            await self._signals.catch_up(session_id, told)
        except NoWorker:
            # It waits for one; Temporal is there, and other sessions have drivers.
            self._pauses.pop(session_id, None)
        except Unavailable:
            # As soon as it can be reached again.
            self._pauses.pop(session_id, None)
            return False
        except Exception:
            log.exception("session %s could not be told what it was sent", session_id)
        return True

    async def _ask(self, session_id: str, told: set[str]) -> None:
        """Find out what the driver holds. While it does not say, what it was told counts as that."""
        if self._silent >= _AT_ONCE:
            # Whoever was not told by us is told now, once, and waits for nobody.
            return
        try:
            view = await self._signals.describe(session_id)
        except NoDriver:
            # Whoever follows it knows nothing of what it was told.
            told.clear()
            return
        if view is None:
            self._silent += 1
            return
        told.clear()
        told.update(view.holds)

    def _due(self, untold: Untold) -> bool:
        now = self._clock()
        known = self._pauses.get(untold.session_id)
        if known is None or known.about != untold:
            known = _Pause(untold, now, self._every)
        if now < known.until and not untold.failed:
            return False
        longest = _LONGEST if untold.cancel_turn is None else _LONGEST_WISH
        self._pauses[untold.session_id] = _Pause(untold, now + known.length, min(longest, known.length * 2))
        return True


@contextlib.asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[object]], between: tuple[float, float], *, away: str, failed: str
) -> AsyncGenerator[None]:
    """Do the work now and then while this is open: after a pause between these two, so that not all do it at once.

    `away` and `failed`: what the log says when the store or Temporal cannot be reached, and when the fault is ours.
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
            # A fault of ours must not end the work for good.
            log.exception("%s; it will be tried again", failed)
