"""How the tests of lanes wait, and what they read."""

import asyncio
from typing import Any

from perdure.protocol.events import BOUNDARIES
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store


async def ended(sessions: Sessions, delivery_id: str | None) -> dict[str, Any]:
    assert delivery_id is not None
    return (await sessions.inbox.wait(delivery_id, None, 30)).shown()


async def boundaries(store: Store, session_id: str, count: int) -> list[Any]:
    async with asyncio.timeout(60), store.watch(session_id) as watch:
        while True:
            found = list(await store.events(session_id))
            if sum(each.type in BOUNDARIES for each in found) >= count:
                return found
            await watch.changed()


def said(found: list[Any], type: str = "message.completed") -> list[str]:
    return [each.data["message"] for each in found if each.type == type]


async def told(store: Store, session_id: str, turn: int) -> list[str]:
    """What the message of the turn was told about other lanes."""
    record = await store.record(session_id, turn, 0, "delivery/0")
    assert record is not None
    return list(record.body["clientContext"])


async def runs(store: Store, session_id: str) -> bool:
    row = await store.session(session_id)
    return row is not None and row.status == "running"


async def has_ended(store: Store, session_id: str) -> bool:
    row = await store.session(session_id)
    return row is not None and row.ended
