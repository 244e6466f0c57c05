"""Work that is handed to a session: accepted once under its id, however often, from wherever and whatever dies."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from perdure import AgentRegistry
from perdure.errors import AgentNotFound, IdempotencyConflict, Invalid, NoActiveSession, SessionNotFound, TooLarge
from perdure.protocol.deliveries import LOCAL, Principal
from perdure.runtime.open import open_sessions
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryQuery
from tests.runtime.dispatching import clerk, host
from tests.support.plugin import StackFactory
from tests.support.processes import wait_until
from tests.support.stack import Stack
from tests.support.waiting import until

AGENTS = "tests.runtime.dispatching:served"
BOB = Principal(principal_id="bob", principal_type="user", authenticator="test", subject="bob")


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents=AGENTS)


@pytest.fixture
async def store(stack: Stack) -> AsyncGenerator[Store]:
    store = await stack.store()
    yield store
    await store.close()


@pytest.fixture
async def sessions(stack: Stack, store: Store) -> Sessions:
    return await open_sessions(stack.settings, store, agents=AgentRegistry([host, clerk]))


def new(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex}"


async def settled(sessions: Sessions, delivery_id: str) -> str | None:
    return (await sessions.inbox.wait(delivery_id, None, 30)).outcome


async def messages(store: Store, session_id: str) -> list[Any]:
    return [(each.data or {})["message"] for each in await store.events(session_id) if each.type == "message.received"]


async def accepted(store: Store, session_id: str) -> int:
    return len((await store.list_deliveries(DeliveryQuery(session_id, limit=100))).deliveries)


async def test_many_dispatches_under_one_id_are_one(sessions: Sessions, store: Store) -> None:
    to, once = new("room"), new("job")

    receipts = await asyncio.gather(
        *(sessions.dispatch("clerk", to, {"facts": [1, None]}, dispatch_id=once) for _ in range(8))
    )

    assert len({each.model_dump_json() for each in receipts}) == 1
    assert sorted(each.deduplicated for each in receipts) == [False, *[True] * 7]
    assert receipts[0].dispatch_id == once
    assert await settled(sessions, receipts[0].delivery_id) == "completed"
    assert await messages(store, receipts[0].session_id) == ['{"facts": [1, null]}']
    again = await sessions.dispatch("clerk", to, {"facts": [1, None]}, dispatch_id=once)
    assert again.model_dump() == receipts[0].model_dump()


async def test_without_an_id_each_is_another(sessions: Sessions, store: Store) -> None:
    to = new("room")

    one, other = [await sessions.dispatch("clerk", to, "say yes") for _ in range(2)]

    assert one.session_id == other.session_id
    assert one.dispatch_id == one.delivery_id != other.delivery_id
    assert await settled(sessions, other.delivery_id) == "completed"
    assert await messages(store, one.session_id) == ["say yes", "say yes"]


@pytest.mark.parametrize(
    ("agent", "to", "input"), [("host", "", "say one"), ("clerk", "another", "say one"), ("clerk", "", "say two")]
)
async def test_another_content_under_an_id_is_a_conflict(
    sessions: Sessions, store: Store, agent: str, to: str, input: str
) -> None:
    room, once = new("room"), new("job")
    first = await sessions.dispatch("clerk", room, "say one", dispatch_id=once)

    with pytest.raises(IdempotencyConflict) as raised:
        await sessions.dispatch(agent, to or room, input, dispatch_id=once)

    assert raised.value.details["meta"] == {"submissionId": first.delivery_id}
    assert await accepted(store, first.session_id) == 1


async def test_a_dispatch_says_what_its_message_does_to_a_busy_session(sessions: Sessions, store: Store) -> None:
    begun = await sessions.start("clerk", "drip 200 words delay 50")
    await until(lambda: _runs(store, begun.session_id), "the first turn to run")
    waiting = await sessions.dispatch("clerk", begun.session_id, "say waiting")

    stops = await sessions.dispatch("clerk", begun.session_id, "say now", queue_mode="interrupt")

    assert await settled(sessions, begun.delivery_id or "") == "cancelled"
    assert await settled(sessions, waiting.delivery_id) == "superseded"
    shown = (await sessions.inbox.wait(stops.delivery_id, None, 30)).shown()
    assert (shown["mode"], shown["outcome"]) == ("interrupt", "completed")


async def _runs(store: Store, session_id: str) -> bool:
    row = await store.session(session_id)
    return row is not None and row.status == "running"


async def test_the_mode_is_a_part_of_what_was_dispatched(sessions: Sessions, store: Store) -> None:
    to, once = new("room"), new("job")
    first = await sessions.dispatch("clerk", to, "say one", dispatch_id=once, queue_mode="collect")

    again = await sessions.dispatch("clerk", to, "say one", dispatch_id=once, queue_mode="collect")
    with pytest.raises(IdempotencyConflict):
        await sessions.dispatch("clerk", to, "say one", dispatch_id=once)
    with pytest.raises(IdempotencyConflict):
        await sessions.dispatch("clerk", to, "say one", dispatch_id=once, queue_mode="steer")

    assert (again.deduplicated, again.model_dump()) == (True, first.model_dump())
    assert await accepted(store, first.session_id) == 1
    with pytest.raises(Invalid, match="mode"):
        await sessions.dispatch("clerk", to, "say one", queue_mode="soon")  # pyright: ignore[reportArgumentType]


async def test_a_receipt_outlives_its_session(sessions: Sessions) -> None:
    to, once = new("room"), new("job")
    first = await sessions.dispatch("clerk", to, "say one", dispatch_id=once)
    await settled(sessions, first.delivery_id)
    await sessions.delete(first.session_id, patience=60)

    again = await sessions.dispatch("clerk", to, "say one", dispatch_id=once)
    assert (again.deduplicated, again.model_dump()) == (True, first.model_dump())
    with pytest.raises(IdempotencyConflict) as raised:
        await sessions.dispatch("clerk", to, "say two", dispatch_id=once)
    assert raised.value.details["meta"] == {"submissionId": first.delivery_id}
    with pytest.raises(SessionNotFound):
        await sessions.get(first.session_id)
    # The name is free again, and so is the id for somebody else.
    after = await sessions.dispatch("clerk", to, "say one", dispatch_id=once, principal=BOB)
    assert after.session_id != first.session_id


async def test_a_session_is_named_by_its_id(sessions: Sessions, store: Store) -> None:
    begun, once = await sessions.start("clerk", "say begun"), new("job")

    receipt = await sessions.dispatch("clerk", begun.session_id, "say more", dispatch_id=once)

    assert receipt.session_id == begun.session_id
    assert await settled(sessions, receipt.delivery_id) == "completed"
    assert await messages(store, begun.session_id) == ["say begun", "say more"]
    with pytest.raises(Invalid, match="another agent"):
        await sessions.dispatch("host", begun.session_id, "say more")
    with pytest.raises(SessionNotFound):
        await sessions.dispatch("clerk", begun.session_id, "say more", principal=BOB)
    with pytest.raises(SessionNotFound):
        await sessions.dispatch("clerk", "ses_unknown", "say more")
    await sessions.reset(begun.session_id)
    await until(lambda: _ended(sessions, begun.session_id), "the end of the session")
    with pytest.raises(NoActiveSession):
        await sessions.dispatch("clerk", begun.session_id, "say more")
    again = await sessions.dispatch("clerk", begun.session_id, "say more", dispatch_id=once)
    assert (again.deduplicated, again.model_dump()) == (True, receipt.model_dump())
    await sessions.delete(begun.session_id, patience=60)
    again = await sessions.dispatch("clerk", begun.session_id, "say more", dispatch_id=once)
    assert (again.deduplicated, again.model_dump()) == (True, receipt.model_dump())


async def _ended(sessions: Sessions, session_id: str) -> bool:
    return (await sessions.get(session_id)).ended


async def test_a_session_of_another_principal_is_spoken_to_by_trusted_code(sessions: Sessions, store: Store) -> None:
    begun, once = await sessions.start("clerk", "say begun", principal=BOB), new("job")

    receipt = await sessions.dispatch("clerk", begun.session_id, "say more", dispatch_id=once)

    assert await settled(sessions, receipt.delivery_id) == "completed"
    await sessions.delete(begun.session_id, patience=60)
    again = await sessions.dispatch("clerk", begun.session_id, "say more", dispatch_id=once)
    assert (again.deduplicated, again.model_dump()) == (True, receipt.model_dump())


async def test_an_input_is_plain_json(sessions: Sessions) -> None:
    loop: list[Any] = []
    loop.append(loop)

    for wrong in (float("nan"), {1: 2}, (1, 2), b"bytes", len, loop, 10**5000, {"at": {1, 2}}):
        with pytest.raises(Invalid):
            await sessions.dispatch("clerk", new("room"), wrong)


async def test_what_cannot_be_dispatched_is_refused(sessions: Sessions) -> None:
    with pytest.raises(TooLarge):
        await sessions.dispatch("clerk", new("room"), "x" * 1_048_576)
    with pytest.raises(AgentNotFound):
        await sessions.dispatch("nobody", new("room"), "say one")
    for wrong in ("", "x" * 256, "a\nb"):
        with pytest.raises(Invalid):
            await sessions.dispatch("clerk", new("room"), "say one", dispatch_id=wrong)
    for wrong in ("", "a\nb"):
        with pytest.raises(Invalid):
            await sessions.dispatch("clerk", wrong, "say one")


async def test_a_token_that_is_given_away_by_an_end_gets_another_session(sessions: Sessions) -> None:
    to = new("room")
    first = await sessions.dispatch("clerk", to, "say one")
    await settled(sessions, first.delivery_id)
    await sessions.reset(first.session_id)
    await until(lambda: _ended(sessions, first.session_id), "the end of the session")

    second = await sessions.dispatch("clerk", to, "say two")

    assert second.session_id != first.session_id
    assert await settled(sessions, second.delivery_id) == "completed"


async def test_a_dispatch_over_http(stack: Stack) -> None:
    body = {"agent": "clerk", "id": new("desk"), "input": {"say": 1}, "dispatchId": new("job")}
    async with stack.talk() as talk:
        first = await talk.http.post("/v1/dispatches", json=body)
        again = await talk.http.post("/v1/dispatches", json=body)
        other = await talk.http.post("/v1/dispatches", json={**body, "input": None})
        named = {**body, "dispatchId": new("job"), "mode": "collect"}
        collected = await talk.http.post("/v1/dispatches", json=named)
        changed = await talk.http.post("/v1/dispatches", json={**named, "mode": "steer"})
        moded = await talk.http.get(f"/v1/deliveries/{collected.json()['deliveryId']}")
        over = await talk.http.get(f"/v1/deliveries/{first.json()['deliveryId']}", headers={"prefer": "wait=30"})
        events = await talk.http.get(f"/agents/clerk/{body['id']}", params={"offset": "-1"})

    assert first.status_code == again.status_code == 202
    assert first.content == again.content
    assert again.headers["idempotency-replayed"] == "true"
    assert set(first.json()) == {"dispatchId", "acceptedAt", "sessionId", "deliveryId"}
    assert (collected.status_code, moded.json()["mode"]) == (202, "collect")
    assert (changed.status_code, changed.json()["code"]) == (409, "idempotency_key_reused")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    assert over.json()["outcome"] == "completed"
    # The instance of the agent has this name for its other clients, too.
    assert events.status_code == 200
    assert "submission_settled" in events.text


@pytest.mark.parametrize(
    ("changed", "headers"),
    [
        ({"agent": 1}, {}),
        ({"id": None}, {}),
        ({"dispatchId": 7}, {}),
        ({"dispatchId": "a"}, {"idempotency-key": "b"}),
        ({"id": ""}, {}),
        ({"mode": "soon"}, {}),
        ({"mode": 1}, {}),
        ({"input": ...}, {}),
    ],
)
async def test_a_bad_dispatch_over_http_is_400(stack: Stack, changed: dict[str, Any], headers: dict[str, str]) -> None:
    body = {"agent": "clerk", "id": new("desk"), "input": "say one", **changed}
    async with stack.talk() as talk:
        answer = await talk.http.post(
            "/v1/dispatches", json={name: value for name, value in body.items() if value is not ...}, headers=headers
        )

    assert answer.status_code == 400


async def test_a_tool_that_dies_after_it_has_dispatched_does_so_once(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = make_stack(provider=True, workers=0, agents=AGENTS)
    deadly = {"PERDURE_KILL_POINT": "tool_after_effect", "PERDURE_KILL_ONCE_FILE": str(tmp_path / "once")}
    worker = stack.start_worker(deadly)
    async with stack.talk() as talk:
        await talk.create('call remember {"about": "tea", "facts": ["green", "black"]} then say Noted')
        await asyncio.to_thread(wait_until, lambda: not worker.alive, "the worker to die")
        stack.start_worker()
        events = await talk.until_boundary()
        store = await stack.store()
        try:
            told = next(each for each in events if each["type"] == "action.result")["data"]["result"]["output"]
            [first, second] = [(await store.find_delivery(each))[0] for each in told.split()]
            assert first.session_id == second.session_id
            async with asyncio.timeout(30), store.watch(first.session_id) as watch:
                while await messages(store, first.session_id) != ["say green", "say black"]:
                    await watch.changed()
            assert await accepted(store, first.session_id) == 2
            row = await store.session(first.session_id)
            assert row is not None
            assert row.principal.owner == LOCAL.owner
        finally:
            await store.close()


async def test_a_run_dispatches_once(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = make_stack(provider=True, workers=0, agents=AGENTS)
    deadly = {"PERDURE_KILL_POINT": "run_before_settle", "PERDURE_KILL_ONCE_FILE": str(tmp_path / "once")}
    worker = stack.start_worker(deadly)
    async with stack.talk() as talk:
        begun = await talk.http.post("/workflows/noting", json={"about": "tea", "facts": ["say green"]})
        await asyncio.to_thread(wait_until, lambda: not worker.alive, "the worker to die")
        stack.start_worker()

        async def done() -> bool:
            found = (await talk.http.get(f"/runs/{begun.json()['runId']}?meta")).json()
            return found["status"] != "active"

        await until(done, "the end of the run")
        over = (await talk.http.get(f"/runs/{begun.json()['runId']}?meta")).json()

        store = await stack.store()
        try:
            assert over["status"] == "completed", over
            assert await accepted(store, over["result"]["sessionId"]) == 1
        finally:
            await store.close()
