"""The events of a session and of all that were started from it, in the order of their times."""

import asyncio
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from perdure.bounds import quoted
from perdure.errors import SessionNotFound
from perdure.protocol.events import Event
from perdure.store.base import Store, Watch
from perdure.store.values import SessionRow

#: How many events of each member are read at once: a family may have a thousand.
_PAGE = 100


@dataclass(frozen=True)
class Told:
    """An event, and the session whose it is."""

    session: SessionRow
    event: Event


@dataclass
class _Member:
    """A session that is followed."""

    watch: Watch
    # The index of its next event.
    next: int = 0


async def events_of_family(store: Store, session_id: str, *, follow: bool = True) -> AsyncGenerator[Told]:
    """The events of the session and of its descendants. With `follow`, until all of them have ended.

    Events that are there already are sorted by their times. Those that come later are told as they come, and the
    clocks of workers differ by some milliseconds.
    """
    members: dict[str, _Member] = {}
    async with AsyncExitStack() as watches:
        while True:
            rows = await _branch(store, session_id)
            fresh = [row for row in rows if row.session_id not in members]
            for row in fresh:
                members[row.session_id] = _Member(await watches.enter_async_context(store.watch(row.session_id)))
            if fresh and follow:
                # They may have changed before they were watched.
                continue
            async for told in _merged(store, rows, members):
                yield told
            open = [members[row.session_id] for row in rows if not row.ended]
            if not (follow and open):
                return
            await _any_change(open)


async def _branch(store: Store, session_id: str) -> Sequence[SessionRow]:
    """The session and its descendants."""
    top = await store.session(session_id)
    if top is None:
        raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
    family: list[SessionRow] = []
    page = await store.family(top.root_id or session_id)
    family.extend(page.sessions)
    while page.next_cursor is not None:
        page = await store.family(top.root_id or session_id, page.next_cursor)
        family.extend(page.sessions)
    found, more = {session_id: top}, True
    while more:
        below = [row for row in family if row.parent_id in found and row.session_id not in found]
        found |= {row.session_id: row for row in below}
        more = bool(below)
    return list(found.values())


async def _merged(store: Store, rows: Sequence[SessionRow], members: dict[str, _Member]) -> AsyncIterator[Told]:
    """The new events of these sessions, up to those that their rows count."""
    heap: list[tuple[str, int, Told, AsyncIterator[Event]]] = []

    async def push(number: int, row: SessionRow, events: AsyncIterator[Event]) -> None:
        event = await anext(events, None)
        if event is not None:
            heapq.heappush(heap, (event.at, number, Told(row, event), events))

    for number, row in enumerate(rows):
        member = members[row.session_id]
        await push(number, row, _events(store, row, member.next))
        member.next = row.events
    while heap:
        _, number, told, events = heapq.heappop(heap)
        yield told
        await push(number, told.session, events)


async def _events(store: Store, row: SessionRow, start: int) -> AsyncIterator[Event]:
    while start < row.events:
        page = await store.events(row.session_id, start, min(_PAGE, row.events - start))
        if not page:
            # It was deleted meanwhile.
            return
        for event in page:
            yield event
        start = page[-1].index + 1


async def _any_change(members: Sequence[_Member]) -> None:
    """Wait until one of them has new events."""
    waiting = [asyncio.create_task(member.watch.changed()) for member in members]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    for task in done:
        task.result()
