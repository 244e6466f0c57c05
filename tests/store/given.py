"""Values that the store's tests begin with, and small ways to use them."""

import asyncio
from collections.abc import Awaitable, Callable

from perdure.protocol.events import Event, NewEvent
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject
from perdure.store.base import Attempt, Commit, Fence, Hold, NewDelivery, NewRecord, NewSession, Store

ADA = Principal(principal_id="ada", principal_type="user", authenticator="test", attributes={"team": ["a", "b"]})
BOB = Principal(principal_id="bob", principal_type="user", authenticator="test")

MODEL = "model"


def session(
    session_id: str = "s", *, token: str | None = None, agent: str = "echo", who: Principal = ADA
) -> NewSession:
    return NewSession(session_id, agent, "conversation", token or f"token of {session_id}", who)


def delivery(
    delivery_id: str = "d",
    *,
    session_id: str = "s",
    key: str | None = None,
    digest: str = "digest",
    owner: str = ADA.owner,
    body: JsonObject | None = None,
) -> NewDelivery:
    return NewDelivery(session_id, delivery_id, body or {"message": "hello"}, owner, key, digest)


def event(key: str, **data: object) -> NewEvent:
    return NewEvent(type="test.event", key=key, data=dict(data) or None)


def record(slot: str = "reply", *, turn: int = 0, step: int = 0, **body: object) -> NewRecord:
    return NewRecord(turn, step, slot, "test/1", dict(body))


def fence(hold: Hold, generation: int, *, turn: int = 0, step: int = 0, scope: str = MODEL) -> Fence:
    return Fence(turn, step, scope, Attempt(number=generation, generation=generation), hold)


def raising(generation: int, *, turn: int = 0, step: int = 0) -> Commit:
    return Commit("s", fence=fence(Hold.RAISE, generation, turn=turn, step=step))


def keeping(generation: int, *, turn: int = 0, step: int = 0) -> Commit:
    return Commit("s", fence=fence(Hold.KEEP, generation, turn=turn, step=step))


async def everything(store: Store, session_id: str = "s") -> list[Event]:
    events: list[Event] = []
    while page := await store.events(session_id, len(events)):
        events.extend(page)
    return events


async def keys(store: Store, session_id: str = "s") -> list[str]:
    return [event.key for event in await everything(store, session_id)]


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within: float = 10.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(within):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)
