"""Finds sessions whose turn runs and moves no more, because its worker is gone and no other one has taken it over.

A long call whose worker lives is silent in the log, too, but its worker sends heartbeats. So while readers watch a
session that is silent, Temporal is asked when it has last heard of the turn: once per heartbeat timeout and session,
however many readers there are.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from perdure.errors import Unavailable
from perdure.protocol.wire import JsonObject
from perdure.runtime.drivers.liveness import Sign
from perdure.store.base import Store
from perdure.store.engine.rows import stamp_of
from perdure.store.values import SessionRow

log = logging.getLogger("perdure.api.stream")

#: The last sign of life of a running turn, by the heartbeat timeout; None: nothing of it waits for a worker.
LastSign: TypeAlias = Callable[[SessionRow, float], Awaitable[Sign | None]]


@dataclass(frozen=True)
class Stall:
    """A running turn that has no worker."""

    # When its work has last given a sign of life, in seconds since the epoch.
    since: float
    held_by: str | None = None

    @property
    def shown(self) -> JsonObject:
        since = stamp_of(self.since)
        return {"since": since} if self.held_by is None else {"since": since, "heldBy": self.held_by}


class Watched(Protocol):
    """A session with readers."""

    @property
    def session_id(self) -> str: ...

    @property
    def position(self) -> int:
        """The number of its events, as far as this process has read them."""
        ...

    @property
    def moved_at(self) -> float:
        """When the last of them was read, by the clock of the event loop."""
        ...

    async def tell(self, stall: Stall | None) -> None:
        """Set what its readers should know; None: it moves."""
        ...


@dataclass(frozen=True)
class _Seen:
    """A sign, and when it was seen first, by the clock of the event loop."""

    sign: Sign
    at: float


class Stalls:
    """Looks after the watched sessions of this process."""

    def __init__(
        self, store: Store, last_sign: LastSign, heartbeat: float, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._last_sign = last_sign
        self._heartbeat = heartbeat
        self._clock = clock

    async def watch(self, session: Watched) -> None:
        """Tell this session whether it stalls, for as long as it is watched."""
        loop = asyncio.get_running_loop()
        seen: _Seen | None = None
        # With so many events the session was parked. Only an event changes that.
        parked_at = -1
        while True:
            if (silent := loop.time() - session.moved_at) < self._heartbeat:
                seen = None
                await asyncio.sleep(self._heartbeat - silent)
                continue
            position, now = session.position, loop.time()
            if position != parked_at:
                try:
                    row = await self._store.session(session.session_id)
                    if row is None or not _runs(row):
                        parked_at, sign = position, None
                    else:
                        sign = await self._last_sign(row, self._heartbeat)
                except Unavailable as error:
                    # Nothing is known now: what readers have been told stays.
                    log.debug("whether %s stalls is not known: %s", session.session_id, error.message)
                except Exception:
                    log.exception("whether %s stalls could not be found out", session.session_id)
                else:
                    seen = None if sign is None else seen if seen and seen.sign.at == sign.at else _Seen(sign, now)
                    if session.position == position:
                        await session.tell(self._stall(seen, now))
            await asyncio.sleep(self._heartbeat)

    def _stall(self, seen: _Seen | None, now: float) -> Stall | None:
        """The stall that this sign means, if it has been the last one for two heartbeat timeouts.

        The clocks of this machine and of Temporal may differ. So a sign counts as old only if none has followed it for
        a heartbeat timeout of ours: with a worker that lives there would have been several.
        """
        if seen is None:
            return None
        sign, observed = seen.sign, now - seen.at
        age = max(observed, self._clock() - sign.at)
        stalls = observed >= sign.heartbeat and age >= 2 * sign.heartbeat
        return Stall(sign.at, sign.held_by) if stalls else None


def _runs(row: SessionRow) -> bool:
    """Whether a worker should be at work. Readers of a session that needs attention know that from its events."""
    return row.status == "running" and row.attention is None
