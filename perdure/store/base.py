"""The store as the rest of Perdure sees it: one Protocol, two adapters, one conformance suite.

Everything a session says and does is written through `commit`: one transaction that fences, records, tells,
and updates the read model together. Writing the same commit twice is writing it once.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from perdure.errors import SessionNotFound, Unavailable
from perdure.protocol.events import Event, NewEvent
from perdure.protocol.requests import Attention
from perdure.text import quoted

from .values import (
    Accepted,
    Answered,
    Answering,
    CancelRequest,
    Commit,
    Committed,
    DeliveryRow,
    InputPage,
    InputQuery,
    InputRow,
    NewDelivery,
    NewSession,
    Record,
    SessionPage,
    SessionQuery,
    SessionRow,
    Slot,
    Untold,
)


class Watch(Protocol):
    """A subscription to one session. Wakes at least once after each commit that appended events."""

    async def changed(self, within: float | None = None) -> bool:
        """Wait for news since the last call; False when `within` seconds passed without any."""
        ...


class Store(Protocol):
    """What every store does. Errors of the database that may pass are raised as `Unavailable`."""

    async def migrate(self) -> None:
        """Create or upgrade the schema. One that is not ours, or needs newer code, is refused before any write."""

    async def check(self) -> None:
        """Refuse to go on with a schema that this code cannot work with: an older one, or one that needs newer code."""

    async def close(self) -> None: ...

    # sessions
    async def create_session(self, session: NewSession, delivery: NewDelivery | None = None) -> Accepted | None:
        """Write row (status `starting`), route and first delivery together.

        With an idempotency key that is known: nothing is written, and the first delivery is returned (`fresh` is
        False); `IdempotencyConflict` when its digest differs. `TokenConflict` when a live session owns the token.
        """
        ...

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def sessions(self, query: SessionQuery) -> SessionPage: ...

    async def open_sessions(self, after: str, limit: int) -> Sequence[str]:
        """The ids of sessions that are not over, in order, behind `after`."""
        ...

    async def cancel(
        self, session_id: str, turn_id: str | None, tell: Callable[[int], NewEvent]
    ) -> CancelRequest | None:
        """Accept that the turn which runs, waits or is about to begin is to be stopped; None when there is none, or
        another one than `turn_id`. From then on no commit that heeds that turn goes through."""
        ...

    async def attend(self, session_id: str, attention: Attention, turn: int | None = None) -> bool:
        """Mark the session as in need of attention, and tell readers. False: it is so already, over, or past `turn`."""
        ...

    async def route(self, token_hash: str) -> str | None: ...

    async def token_of(self, session_id: str) -> str | None:
        """The hash of the session's token."""
        ...

    # deliveries
    async def accept(self, delivery: NewDelivery) -> Accepted:
        """Write the delivery, or find the first one under its idempotency key (`IdempotencyConflict` as above).

        `SessionGone` when the session is unknown or over; `InboxFull` when `delivery.limit` others wait.
        """
        ...

    async def first(self, delivery: NewDelivery) -> Accepted | None:
        """The delivery that was accepted under this idempotency key (`IdempotencyConflict` as above)."""
        ...

    async def refuse(self, session_id: str, delivery_id: str, code: str, event: NewEvent) -> bool:
        """Mark a delivery as refused and say so, in one transaction; False when a turn has heard it. Of one that is not
        there readers are told only. When nothing is left to begin a turn, a wish to stop that turn is settled."""
        ...

    async def deliveries(self, session_id: str, delivery_ids: Sequence[str]) -> Sequence[DeliveryRow]:
        """Those that exist, in the order asked for."""
        ...

    async def unheard(self, session_id: str) -> Sequence[DeliveryRow]:
        """The session's deliveries that no turn has read and nobody has refused, in order, without their bodies."""
        ...

    async def count_unheard(self, session_id: str) -> int: ...

    async def untold(self, *, older_than: float, after: str, limit: int) -> Sequence[Untold]:
        """Sessions, in the order of their ids, behind `after`, of which Temporal may not know everything: a delivery
        that is older than so many seconds waits, a turn is to be stopped, or the session has not begun."""
        ...

    async def mark_untold(self, session_id: str) -> None:
        """Note, once more, that Temporal could not be told of something."""

    async def clear_untold(self, session_id: str, marks: int) -> None:
        """Note that Temporal was told of everything, unless the session has more or fewer than these marks by now."""

    # inputs
    async def answer(self, answering: Answering, tell: Callable[[InputRow], NewEvent]) -> Answered:
        """Count the votes, each against the request as it stands: the first verdict wins.

        A vote on an open request is added to its votes (one per principal: the first) and, when
        `session.inputs.verdict` says so, closes it as `answered` with that answer and this delivery's id; then
        `tell(row)` is appended. A vote on a closed request changes nothing. An unknown request, or one of another
        session, raises `NotFound` before anything is written. Idempotency keys as for `accept`.
        """
        ...

    async def input(self, request_id: str) -> InputRow | None: ...

    async def inputs(self, query: InputQuery) -> InputPage: ...

    # journal
    async def commit(self, commit: Commit) -> Committed: ...

    async def records(self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None) -> Sequence[Record]:
        """Records of turns from_turn..to_turn (inclusive), ordered by turn, step, slot."""
        ...

    async def record(self, session_id: str, turn: int, step: int, slot: str) -> Record | None: ...

    async def slots(self, session_id: str, names: Sequence[str]) -> dict[str, Slot]: ...

    # events
    async def events(self, session_id: str, start: int = 0, limit: int = 500) -> Sequence[Event]:
        """Events with index >= start, in order."""
        ...

    async def index_of(self, session_id: str, key: str) -> int | None:
        """The index of the event with this key."""
        ...

    def watch(self, session_id: str) -> AbstractAsyncContextManager[Watch]: ...


async def read_all(store: Store, session_id: str, start: int = 0) -> AsyncIterator[Event]:
    """Every event that is there now."""
    while page := await store.events(session_id, start):
        for event in page:
            yield event
        start = page[-1].index + 1


async def events_of(store: Store, session_id: str, start: int = 0, *, follow: bool = True) -> AsyncGenerator[Event]:
    """The session's events from `start` on. With `follow` it waits for more until the session is over."""
    async with store.watch(session_id) as watch:
        while True:
            # Read before its events, so that those of a session that is over are all there.
            row = await store.session(session_id)
            if row is None:
                raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
            while page := await store.events(session_id, start):
                for event in page:
                    yield event
                start = page[-1].index + 1
            if row.over or not follow:
                return
            await watch.changed()


#: Half a minute in all: longer than a failover, shorter than anybody's patience.
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)


async def commit_steadfastly(store: Store, commit: Commit) -> Committed:
    """Commit what is paid for or has happened already: to lose it would be to pay or to do it twice."""
    for pause in _PAUSES:
        try:
            return await store.commit(commit)
        except Unavailable:
            await asyncio.sleep(pause)
    return await store.commit(commit)
