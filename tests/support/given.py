"""Values that the store's tests begin with, and small ways to use them."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from perdure.errors import OutcomeUnknown, Unavailable
from perdure.protocol.deliveries import Principal
from perdure.protocol.events import Event, EventType, NewEvent
from perdure.protocol.inputs import InputAnswer, InputKind, InputRequest, Responders
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, NewDelivery
from perdure.store.engine.database import migrations
from perdure.store.inputs import Answered, Answering, InputRow, Vote
from perdure.store.values import (
    Attempt,
    Commit,
    Consumption,
    Fence,
    Hold,
    InputChanges,
    NewRecord,
    NewSession,
    SessionChange,
    SessionRow,
)

T = TypeVar("T")

ADA = Principal(principal_id="ada", principal_type="user", authenticator="test", attributes={"team": ["a", "b"]})
BOB = Principal(principal_id="bob", principal_type="user", authenticator="test")

MODEL = "model"

#: The newest version of the schema.
SCHEMA = len(migrations("sqlite"))


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
    ref: JsonObject | None = None,
    limit: int | None = None,
) -> NewDelivery:
    return NewDelivery(session_id, delivery_id, body or {"message": "hello"}, owner, key, digest, ref, limit)


def consuming(*delivery_ids: str, turn: int = 0) -> Commit:
    return Commit("s", consume=Consumption(turn, delivery_ids), events=[event(f"t{turn}/received")])


async def refuse(store: Store, delivery_id: str = "d", session_id: str = "s") -> bool:
    return await store.refuse(session_id, delivery_id, "STALE_TOKEN", event(f"refused/{delivery_id}"))


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


def running(turn: int = 0, session_id: str = "s") -> Commit:
    """The turn begins."""
    return Commit(session_id, unless_cancelled=turn, change=SessionChange(status="running", turns=turn + 1))


def ending(turn: int = 0, session_id: str = "s") -> Commit:
    """The turn ends, and the session waits for the next delivery."""
    change = SessionChange(status="waiting", turns=turn + 1)
    return Commit(session_id, unless_cancelled=turn, events=[event(f"t{turn}/end")], change=change)


def parking(*request_ids: str, turn: int = 0, session_id: str = "s") -> Commit:
    """The turn ends, and the session waits for people."""
    return replace(
        ending(turn, session_id),
        inputs=InputChanges(opens=[request(each, session_id=session_id) for each in request_ids]),
    )


def closing(session_id: str = "s") -> Commit:
    """The session ends, with the event of its end."""
    completed = NewEvent(type=EventType.SESSION_COMPLETED, key="session/completed")
    return Commit(session_id, events=[completed], close=True, change=SessionChange(status="completed"))


async def cancel(store: Store, session_id: str = "s", turn_id: str | None = None) -> CancelRequest | None:
    return await store.cancel(session_id, turn_id, cancelling)


def cancelling(turn: int) -> NewEvent:
    return event(f"t{turn}/cancel")


async def attend(store: Store, code: str = "AGENT_GONE", session_id: str = "s") -> bool:
    return await store.set_attention(session_id, Attention(code=code, message=f"{code} happened."))


def request(
    request_id: str = "r",
    *,
    session_id: str = "s",
    agent: str = "echo",
    kind: InputKind = "approval",
    quorum: int = 1,
    summary: str | None = None,
) -> InputRequest:
    return InputRequest(
        request_id=request_id,
        session_id=session_id,
        agent=agent,
        turn=0,
        step=0,
        call_id=f"call of {request_id}",
        tool="pay",
        kind=kind,
        prompt="Pay?",
        summary=summary,
        input={"amount": 3},
        digest="digest",
        display="confirmation",
        responders=Responders(kind="anyone", quorum=quorum),
    )


def opening(*request_ids: str, session_id: str = "s", quorum: int = 1) -> Commit:
    opens = [request(each, session_id=session_id, quorum=quorum) for each in request_ids]
    return Commit(session_id, inputs=InputChanges(opens=opens))


def chooses(option: str, who: str = "ada") -> InputAnswer:
    return InputAnswer(option_id=option, principal_id=who)


def answering(
    *votes: tuple[str, InputAnswer],
    session_id: str = "s",
    delivery_id: str = "a",
    key: str | None = None,
    digest: str = "digest",
    always: bool = False,
    late: bool = False,
    limit: int | None = None,
) -> Answering:
    body: JsonObject = {"kind": "answer", "answers": [request_id for request_id, _ in votes]}
    new = delivery(delivery_id, session_id=session_id, key=key, digest=digest, body=body, limit=limit)
    return Answering(session_id, [Vote(request_id, answer) for request_id, answer in votes], new, always, late)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Do as a caller who gets a 503: many at once may wait longer for a connection than the store lets them."""
    while True:
        try:
            return await call()
        except OutcomeUnknown:
            raise
        except Unavailable:
            # Nothing was accepted.
            continue


async def answer(store: Store, answering: Answering) -> Answered:
    return await store.answer(answering, resolved)


def resolved(row: InputRow) -> NewEvent:
    said = row.answer.option_id if row.answer else None
    return event(f"resolved/{row.request.request_id}", status=row.status, said=said)


async def input_row(store: Store, request_id: str = "r") -> InputRow:
    row = await store.input(request_id)
    assert row is not None
    return row


async def read_session(store: Store, session_id: str = "s") -> SessionRow:
    row = await store.session(session_id)
    assert row is not None
    return row


async def everything(store: Store, session_id: str = "s") -> list[Event]:
    events: list[Event] = []
    while page := await store.events(session_id, len(events)):
        events.extend(page)
    return events


async def dense(store: Store, session_id: str = "s") -> bool:
    """Whether the events are numbered without gaps, and the session's row knows how many there are."""
    events = await everything(store, session_id)
    count = (await read_session(store, session_id)).events
    return [each.index for each in events] == list(range(count))


async def keys(store: Store, session_id: str = "s") -> list[str]:
    return [event.key for event in await everything(store, session_id)]
