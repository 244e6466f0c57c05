"""Reading a list to its end, a page at a time."""

from collections.abc import AsyncIterator

from perdure.protocol.events import Event

from .base import Store


async def read_all(store: Store, session_id: str, start: int = 0) -> AsyncIterator[Event]:
    """Every event that is there now."""
    while page := await store.events(session_id, start):
        for event in page:
            yield event
        start = page[-1].index + 1
