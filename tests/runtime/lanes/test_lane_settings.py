"""What is set for the lanes of one session, in place of what its agent declares."""

import uuid
from dataclasses import replace
from typing import Any

import pytest

from perdure import AgentRegistry, Lane
from perdure.errors import InboxFull, Invalid, NoActiveSession, SessionNotFound, UnknownLane
from perdure.protocol.deliveries import LOCAL, Principal
from perdure.runtime.open import open_sessions
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store
from tests.runtime.lanes import boundaries, ended, has_ended, runs, said, told
from tests.runtime.served import chat
from tests.support.stack import Stack
from tests.support.waiting import until

BOB = Principal(principal_id="bob", principal_type="user", authenticator="test", subject="bob")


async def test_what_is_set_for_a_lane_holds_for_what_is_accepted_from_then_on(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "drip 40 words delay 50")
    token = main.continuation_token or ""
    await until(lambda: runs(store, main.session_id), "the first turn to run")
    before = await sessions.deliver(token, "say before")

    await sessions.configure_lane(main.session_id, "main", mode="collect", cap=3, principal=LOCAL)
    after = await sessions.deliver(token, "say after")
    own = await sessions.deliver(token, "say own", queue_mode="followup")
    with pytest.raises(InboxFull):
        await sessions.deliver(token, "say too much")

    found = [(await sessions.inbox.get(each.delivery_id or "", None)).row.mode for each in (before, after, own)]
    assert found == ["followup", "collect", "followup"]
    for each in (before, after, own):
        assert (await ended(sessions, each.delivery_id))["outcome"] == "completed"


async def test_a_lane_is_set_before_it_begins_and_after_it_has_ended(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    token = main.continuation_token or ""

    set_now = await sessions.configure_lane(main.session_id, "cron", mode="collect")
    first = await sessions.deliver(token, "say one", lane="cron")
    await ended(sessions, first.delivery_id)
    await sessions.reset(first.session_id)
    await until(lambda: has_ended(store, first.session_id), "the end of the lane")
    second = await sessions.dispatch("chat", main.session_id, "say two", lane="cron")
    # The id of a lane stands for its session.
    await sessions.configure_lane(second.session_id, "cron", mode=None, cap=7)
    third = await sessions.dispatch("chat", second.session_id, "say three")

    assert (set_now.row, set_now.settings) == (None, Lane(mode="collect"))
    modes = [(await ended(sessions, each.delivery_id))["mode"] for each in (first, second, third)]
    assert modes == ["collect", "collect", "followup"]
    [_, cron] = await sessions.lanes.shown(await sessions.get(main.session_id))
    assert (cron.overrides, cron.settings) == ({"cap": 7}, Lane(cap=7))


async def test_a_session_behind_a_name_has_its_settings(sessions: Sessions) -> None:
    room = f"room-{uuid.uuid4().hex}"
    main = await sessions.dispatch("chat", room, "say begun")
    await sessions.configure_lane(main.session_id, "main", mode="collect")
    await sessions.configure_lane(main.session_id, "cron", mode="steer")

    later = await sessions.dispatch("chat", room, "say later")
    beside = await sessions.dispatch("chat", room, "say beside", lane="cron")

    assert [(await ended(sessions, each.delivery_id))["mode"] for each in (later, beside)] == ["collect", "steer"]


async def test_what_is_taken_back_is_what_the_agent_declares(stack: Stack, store: Store) -> None:
    declared = Lane(mode="steer", cap=9, overflow="drop_newest")
    sessions = await open_sessions(
        stack.settings, store, agents=AgentRegistry([replace(chat, lanes={"main": declared})])
    )
    main = await sessions.start("chat", "say begun")

    await sessions.configure_lane(main.session_id, "main", mode="followup", overflow="drop_oldest")
    one = await sessions.configure_lane(main.session_id, "main", cap=2)
    two = await sessions.configure_lane(main.session_id, "main", cap=2)
    back = await sessions.configure_lane(main.session_id, "main", mode=None, cap=None, overflow=None)

    assert one == two
    assert one.settings == Lane(mode="followup", cap=2, overflow="drop_oldest")
    assert (back.settings, back.overrides) == (declared, {})


async def test_a_fork_begins_with_what_the_agent_declares(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)
    await sessions.configure_lane(main.session_id, "main", mode="collect")

    fork = await sessions.fork(main.session_id, 0)

    [lane] = await sessions.lanes.shown(await sessions.get(fork.session_id))
    assert (lane.settings, lane.overrides) == (Lane(), {})


async def test_only_the_owner_of_a_living_session_sets_what_can_be(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "say begun")
    await boundaries(store, main.session_id, 1)

    with pytest.raises(SessionNotFound):
        await sessions.configure_lane(main.session_id, "main", mode="collect", principal=BOB)
    with pytest.raises(UnknownLane, match="audit"):
        await sessions.configure_lane(main.session_id, "audit", mode="collect")
    wrongs: list[Any] = [
        {},
        {"mode": "soon"},
        {"mode": ["collect"]},
        {"cap": 0},
        {"cap": True},
        {"cap": "7"},
        {"cap": 10**5000},
        {"overflow": "summarise"},
        {"overflow": {}},
    ]
    for wrong in wrongs:
        with pytest.raises(Invalid):
            await sessions.configure_lane(main.session_id, "main", **wrong)
    await sessions.reset(main.session_id)
    await until(lambda: has_ended(store, main.session_id), "the end of the session")
    with pytest.raises(NoActiveSession, match="has ended"):
        await sessions.configure_lane(main.session_id, "main", mode="collect")


async def test_a_turn_hears_how_those_began_for_which_there_was_no_room(sessions: Sessions, store: Store) -> None:
    main = await sessions.start("chat", "drip 40 words delay 50")
    token = main.continuation_token or ""
    await until(lambda: runs(store, main.session_id), "the first turn to run")
    await sessions.configure_lane(main.session_id, "main", cap=1, overflow="summarize")

    first, second, last = [await sessions.deliver(token, f"say {word}") for word in ("one", "two", "three")]

    assert (await ended(sessions, last.delivery_id))["outcome"] == "completed"
    for each in (first, second):
        assert (await ended(sessions, each.delivery_id))["outcome"] == "superseded"
    [news] = await told(store, main.session_id, 1)
    assert news.splitlines()[1:] == ["- say one", "- say two"]
    events = await store.events(main.session_id)
    assert said(list(events), "message.received")[1:] == ["say three"]


async def test_lanes_are_set_over_http(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say begun")
        lanes = f"/v1/sessions/{talk.session_id}/lanes"

        put = await talk.http.put(f"{lanes}/cron", json={"mode": "steer_backlog", "cap": 5, "overflow": "drop_oldest"})
        await talk.http.put(f"{lanes}/main", json={"mode": "collect"})
        shown = (await talk.http.get(lanes)).json()["lanes"]
        again = await talk.http.put(f"{lanes}/cron", json={"mode": None, "cap": None, "overflow": None})
        wrong = [
            (await talk.http.put(f"{lanes}/{lane}", content=content)).status_code
            for lane, content in (
                ("cron", b"{}"),
                ("cron", b"7"),
                ("cron", b'{"cap": 1.5}'),
                ("cron", b'{"mode": "soon"}'),
                ("cron", b'{"mode": "collect", "overfow": "drop_oldest"}'),
                ("audit", b'{"cap": 1}'),
                ("x" * 5000, b'{"cap": 1}'),
            )
        ]
        nobody = await talk.http.put("/v1/sessions/ses_unknown/lanes/main", json={"mode": "soon"})
        left = (await talk.http.get(lanes)).json()["lanes"]

    cron = {"lane": "cron", "queued": 0, "mode": "followup", "cap": 5, "overflow": "drop_oldest"}
    overrides = {"mode": "followup", "cap": 5, "overflow": "drop_oldest"}
    assert (put.status_code, put.json()) == (200, {**cron, "overrides": overrides})
    assert shown[1] == put.json()
    assert (shown[0]["mode"], shown[0]["cap"], shown[0]["overrides"]) == ("collect", 100, {"mode": "collect"})
    assert (again.status_code, again.json()["overrides"]) == (200, {})
    assert wrong == [400] * 7
    assert nobody.status_code == 404
    assert [each["lane"] for each in left] == ["main"]
