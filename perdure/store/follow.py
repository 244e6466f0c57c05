"""Following what the store has of a session: its events, and whatever else changes with it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from perdure.bounds import quoted
from perdure.errors import SessionNotFound
from perdure.protocol.events import Event

from .base import Store

T = TypeVar("T")


async def read_all(store: Store, session_id: str, start: int = 0) -> AsyncIterator[Event]:
    """All events that exist now."""
    while page := await store.events(session_id, start):
        for event in page:
            yield event
        start = page[-1].index + 1


async def events_of(store: Store, session_id: str, start: int = 0, *, follow: bool = True) -> AsyncGenerator[Event]:
    """The session's events from `start` on. With `follow` it waits for more until the session has ended."""
    async with store.watch(session_id) as watch:
        while True:
            # Read before its events, so that those of a session that has ended are all there.
            row = await store.session(session_id)
            if row is None:
                raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
            while page := await store.events(session_id, start):
                for event in page:
                    yield event
                start = page[-1].index + 1
            if row.ended or not follow:
                return
            await watch.changed()


#: Seconds. The store wakes those who wait; this limits the delay after a lost wake-up.
_RECHECK = 5.0


async def looked_at_until(
    store: Store, session_id: str, look: Callable[[], Awaitable[T]], is_over: Callable[[T], bool], within: float | None
) -> T:
    """What `look` finds when that is over, or after so many seconds. It looks again whenever the session changes."""
    try:
        async with asyncio.timeout(within), store.watch(session_id) as watch:
            while not is_over(found := await look()):
                await watch.changed(_RECHECK)
            return found
    except TimeoutError:
        return await look()
