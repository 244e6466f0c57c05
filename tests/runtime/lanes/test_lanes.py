"""Lanes of one session: each in its order, side by side, none held up by another."""

import asyncio
import uuid
from dataclasses import replace

import pytest

from perdure import Agent, AgentRegistry, InvalidDeclaration, Lane
from perdure.errors import IdempotencyConflict, NoActiveSession, UnknownLane
from perdure.runtime.inbox.lanes import OpenLane
from perdure.runtime.open import open_sessions
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store
from perdure.store.inputs import InputQuery
from perdure.store.lifecycle import Restoration
from perdure.store.values import SessionQuery, SessionRow
from tests.runtime.lanes import boundaries, ended, has_ended, runs, said
from tests.runtime.served import chat
from tests.support.stack import Stack
from tests.support.waiting import until


async def test_two_lanes_run_side_by_side_each_in_its_order(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""

    slow = await sessions.deliver(token, "drip 60 words delay 50")
    await until(lambda: runs(store, main.session_id), "the main lane to run")
    beside = [await sessions.deliver(token, f"say {number}", lane="cron") for number in range(3)]
    others = [await ended(sessions, each.delivery_id) for each in beside]
    meanwhile = await sessions.inbox.get(slow.delivery_id or "", None)

    assert [each["outcome"] for each in others] == ["completed"] * 3
    assert meanwhile.status == "running"
    [lane] = {each.session_id for each in beside}
    assert lane != main.session_id
    assert said(await boundaries(store, lane, 3)) == ["0", "1", "2"]
    assert (await ended(sessions, slow.delivery_id))["outcome"] == "completed"
    # The log of the main lane knows nothing of the other one.
    assert said(await boundaries(store, main.session_id, 2))[0] == "begun"
    assert len(said(list(await store.events(main.session_id)))) == 2


async def test_a_lane_that_waits_for_people_holds_up_no_other(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""

    asking = await sessions.deliver(token, 'call pay {"amount": 3} then say paid', lane="heartbeat")
    await boundaries(store, asking.session_id, 1)
    after = await sessions.deliver(token, "say still here")
    assert (await ended(sessions, after.delivery_id))["outcome"] == "completed"
    cron = await sessions.deliver(token, "say and here", lane="cron")
    assert (await ended(sessions, cron.delivery_id))["outcome"] == "completed"
    [request] = (await store.inputs(InputQuery(session_id=asking.session_id))).rows
    await sessions.answer(request.request.request_id, "approve")

    assert (await ended(sessions, asking.delivery_id))["outcome"] == "completed"
    assert said(await boundaries(store, asking.session_id, 2))[-1] == "paid"


async def test_a_lane_may_begin_before_its_session_has_said_anything(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "drip 60 words delay 50")
    await until(lambda: runs(store, main.session_id), "the first turn to run")

    cron = await sessions.deliver(main.continuation_token or "", "say first", lane="cron")

    assert (await ended(sessions, cron.delivery_id))["outcome"] == "completed"
    assert said(await boundaries(store, cron.session_id, 1)) == ["first"]


async def test_temporal_finds_the_lanes_of_a_session(stack: Stack, sessions: Sessions) -> None:
    main = await sessions.start("chat", "say begun")
    cron = await sessions.deliver(main.continuation_token or "", "say first", lane="cron")
    client = await stack.client()

    async def listed() -> bool:
        query = f"PerdureParent = '{main.session_id}'"
        return [each.id async for each in client.list_workflows(query)] == [cron.session_id]

    await until(listed, "Temporal to list the lane")


async def test_many_first_messages_for_a_lane_begin_one(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)

    receipts = await asyncio.gather(
        *(sessions.deliver(main.continuation_token or "", f"say {number}", lane="cron") for number in range(8))
    )

    [lane] = {each.session_id for each in receipts}
    assert sorted(said(await boundaries(store, lane, 8))) == sorted(map(str, range(8)))
    row = await store.session(lane)
    assert row is not None
    assert (row.lane, row.lane_of) == ("cron", main.session_id)
    assert list(await sessions.lanes.of(await sessions.get(main.session_id))) == ["main", "cron"]


async def test_lanes_are_not_sessions_of_the_list_and_go_with_theirs(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    cron = await sessions.deliver(main.continuation_token or "", "say counted", lane="cron")
    await ended(sessions, cron.delivery_id)

    listed = {each.session_id for each in (await sessions.list(SessionQuery(limit=200))).sessions}
    deleted = await sessions.delete(main.session_id, patience=60)

    assert main.session_id in listed
    assert cron.session_id not in listed
    assert deleted.requested_at
    assert await store.session(main.session_id) is None
    assert await store.session(cron.session_id) is None


async def test_lanes_end_with_their_session_after_what_they_have_accepted(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""
    cron = await sessions.deliver(token, "drip 40 words delay 50", lane="cron")
    later = await sessions.deliver(token, "say last", lane="cron")
    await sessions.reset(main.session_id)

    assert (await ended(sessions, later.delivery_id))["outcome"] == "completed"

    async def over() -> bool:
        row = await store.session(cron.session_id)
        return row is not None and row.status == "completed"

    await until(over, "the end of the lane")
    assert (await ended(sessions, cron.delivery_id))["outcome"] == "completed"
    with pytest.raises(NoActiveSession):
        await sessions.deliver(token, "say late", lane="cron")


async def test_a_lane_that_was_ended_begins_again_with_the_next_message(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""
    first = await sessions.deliver(token, "say one", lane="cron")
    await ended(sessions, first.delivery_id)
    await sessions.reset(first.session_id)
    await until(lambda: has_ended(store, first.session_id), "the end of the lane")

    second = await sessions.deliver(token, "say two", lane="cron")

    assert second.session_id != first.session_id
    assert (await ended(sessions, second.delivery_id))["outcome"] == "completed"
    assert list(await sessions.lanes.of(await sessions.get(main.session_id))) == ["main", "cron"]


async def test_work_is_dispatched_to_a_lane(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    room, once = f"room-{uuid.uuid4().hex}", f"job-{uuid.uuid4().hex}"

    by_id = await sessions.dispatch("chat", main.session_id, "say by id", lane="cron", dispatch_id=once)
    by_name = await asyncio.gather(*(sessions.dispatch("chat", room, "say by name", lane="cron") for _ in range(4)))
    later = await sessions.dispatch("chat", room, "say main")

    for each in (by_id, *by_name, later):
        assert (await ended(sessions, each.delivery_id))["outcome"] == "completed"
    [lane] = {each.session_id for each in by_name}
    row = await store.session(lane)
    assert row is not None
    assert row.lane_of == later.session_id
    assert by_id.session_id != main.session_id
    again = await sessions.dispatch("chat", main.session_id, "say by id", lane="cron", dispatch_id=once)
    assert (again.deduplicated, again.model_dump()) == (True, by_id.model_dump())
    with pytest.raises(IdempotencyConflict):
        await sessions.dispatch("chat", main.session_id, "say by id", dispatch_id=once)


async def test_a_session_that_begins_with_a_lane_waits_for_its_own_first_message(
    sessions: Sessions, store: Store
) -> None:
    room = f"room-{uuid.uuid4().hex}"
    by_name = await sessions.dispatch("chat", room, "say by name", lane="cron")

    lane = await store.session(by_name.session_id)
    assert lane is not None
    main = await sessions.describe(lane.lane_of or "")

    assert (main.row.status, main.workflow_status) == ("waiting", "running")
    assert main.row.session_id not in {
        each.session_id for each in await store.unsignalled(older_than=-60, after="", limit=200)
    }
    later = await sessions.dispatch("chat", room, "say main")
    assert (await ended(sessions, later.delivery_id))["outcome"] == "completed"
    events = await boundaries(store, main.row.session_id, 1)
    assert [each.type for each in events][:2] == ["session.started", "turn.started"]


async def test_a_message_over_http_names_its_lane(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say begun")
        receipt = await talk.send("say counted", lane="cron", mode="collect")
        wrong = [
            await talk.http.post(f"/eve/v1/session/{talk.session_id}", json=body)
            for body in (
                {"continuationToken": talk.token, "message": "hi", "lane": "audit"},
                {"continuationToken": talk.token, "message": "hi", "lane": 7},
            )
        ]
        delivery = await talk.http.get(f"/v1/deliveries/{receipt['deliveryId']}", headers={"prefer": "wait=30"})
        lanes = (await talk.http.get(f"/v1/sessions/{talk.session_id}/lanes")).json()["lanes"]
        events = (await talk.http.get(f"/v1/sessions/{receipt['sessionId']}/events")).json()["events"]
        created = await talk.http.post("/eve/v1/session", json={"message": "hi", "lane": "cron"})

    shown = delivery.json()
    assert (shown["lane"], shown["mode"], shown["outcome"]) == ("cron", "collect", "completed")
    assert [each["lane"] for each in lanes] == ["main", "cron"]
    assert lanes[1]["sessionId"] == receipt["sessionId"] == shown["sessionId"] != talk.session_id
    assert [each["data"]["message"] for each in events if each["type"] == "message.completed"] == ["counted"]
    assert [each.status_code for each in wrong] == [400, 400]
    assert wrong[0].json()["code"] == "unknown_lane"
    assert (created.status_code, created.json()["code"]) == (400, "unknown_lane")


async def test_an_agent_declares_lanes_of_its_own(stack: Stack, store: Store) -> None:
    audited = replace(chat, lanes={"audit": Lane(mode="collect")})
    sessions = await open_sessions(stack.settings, store, agents=AgentRegistry([audited]))
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)

    receipt = await sessions.deliver(main.continuation_token or "", "say noted", lane="audit")

    assert (await ended(sessions, receipt.delivery_id))["mode"] == "collect"
    dispatched = await sessions.dispatch("chat", receipt.session_id, "say by its own id")
    assert (await ended(sessions, dispatched.delivery_id))["mode"] == "collect"
    with pytest.raises(InvalidDeclaration):
        Agent("chat", lanes={"Audit!": Lane()})


async def test_an_unknown_lane_is_refused(sessions: Sessions) -> None:
    main = await sessions.start("chat", "say begun")

    with pytest.raises(UnknownLane, match="cron, heartbeat, main, subagent"):
        await sessions.deliver(main.continuation_token or "", "say lost", lane="audit")


async def test_a_lane_begins_while_turns_of_its_session_are_left_out(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""
    await ended(sessions, (await sessions.deliver(token, "say wrong")).delivery_id)
    await store.restore(Restoration(main.session_id, "OPERATOR", 0))

    cron = await sessions.deliver(token, "say counted", lane="cron")

    assert (await ended(sessions, cron.delivery_id))["outcome"] == "completed"
    row = await store.session(cron.session_id)
    assert row is not None
    assert (row.forked_from, row.forked_turns) == (main.session_id, 1)


async def test_a_lane_named_by_the_id_of_another_is_a_lane_of_their_session(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    cron = await sessions.deliver(main.continuation_token or "", "say counted", lane="cron")
    await ended(sessions, cron.delivery_id)

    beat = await sessions.dispatch("chat", cron.session_id, "say beat", lane="heartbeat")
    again = await sessions.dispatch("chat", cron.session_id, "say again", lane="cron")

    assert again.session_id == cron.session_id
    row = await store.session(beat.session_id)
    assert row is not None
    assert row.lane_of == main.session_id
    assert await store.lanes(cron.session_id) == []
    lanes = await sessions.lanes.of(await sessions.get(cron.session_id))
    assert {name: row.session_id for name, row in lanes.items()} == {
        "main": main.session_id,
        "cron": cron.session_id,
        "heartbeat": beat.session_id,
    }


async def test_a_repeated_dispatch_begins_no_lane_of_the_next_session(sessions: Sessions, store: Store) -> None:
    room, once = f"room-{uuid.uuid4().hex}", f"job-{uuid.uuid4().hex}"
    first = await sessions.dispatch("chat", room, "say by name", lane="cron", dispatch_id=once)
    await ended(sessions, first.delivery_id)
    before = await store.session(first.session_id)
    assert before is not None
    await sessions.reset(before.lane_of or "")
    await until(lambda: has_ended(store, before.lane_of or ""), "the end of the session")
    after = await sessions.dispatch("chat", room, "say main")

    again = await sessions.dispatch("chat", room, "say by name", lane="cron", dispatch_id=once)

    assert (again.deduplicated, again.model_dump()) == (True, first.model_dump())
    assert await store.lanes(after.session_id) == []


async def test_a_message_for_a_lane_that_ends_when_it_was_found_begins_it_again(
    sessions: Sessions, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""
    first = await sessions.deliver(token, "say one", lane="cron")
    await ended(sessions, first.delivery_id)
    find = sessions.lanes.open

    async def find_and_end(row: SessionRow, name: str) -> OpenLane:
        found = await find(row, name)
        if found.session_id == first.session_id:
            await sessions.reset(first.session_id)
            await until(lambda: has_ended(store, first.session_id), "the end of the lane")
        return found

    monkeypatch.setattr(sessions.lanes, "open", find_and_end)

    second = await sessions.deliver(token, "say two", lane="cron")

    assert second.session_id != first.session_id
    assert (await ended(sessions, second.delivery_id))["outcome"] == "completed"


async def test_a_lane_keeps_its_place_when_a_tool_asks_for_a_token(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("host", "drip 40 words delay 50")
    taken = f"room-{uuid.uuid4().hex}"
    token = main.continuation_token or ""

    cron = await sessions.deliver(token, f'call adopt {{"token": "{taken}"}} then say done', lane="cron")
    assert (await ended(sessions, cron.delivery_id))["outcome"] == "completed"
    again = await sessions.deliver(token, "say again", lane="cron")

    assert again.session_id == cron.session_id
    with pytest.raises(NoActiveSession):
        await sessions.deliver(taken, "say stolen")


async def test_a_repeated_message_begins_no_lane(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token, once = main.continuation_token or "", uuid.uuid4().hex
    first = await sessions.deliver(token, "say one", lane="cron", idempotency_key=once)
    await ended(sessions, first.delivery_id)
    await sessions.reset(first.session_id)
    await until(lambda: has_ended(store, first.session_id), "the end of the lane")

    again = await sessions.deliver(token, "say one", lane="cron", idempotency_key=once)

    assert (again.deduplicated, again.session_id, again.delivery_id) == (True, first.session_id, first.delivery_id)
    assert [each.session_id for each in await store.lanes(main.session_id)] == [first.session_id]
