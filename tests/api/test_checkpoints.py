"""What the API shows of the progress of sessions, and the way back to a checkpoint."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.protocol.events import EventType
from perdure.store.checkpoints import UNNAMED_KEPT
from perdure.store.values import Commit, Consumption, NewCheckpoint, SessionChange, SlotWrite
from tests.api.asking import known_as
from tests.api.served import Api, of_turn, serving
from tests.api.test_forks import ended_turn

PLAN: dict[str, Any] = {
    "objective": "secret aim",
    "status": "active",
    "steps": [
        {"stepId": 1, "title": "secret first", "status": "done", "doneAt": "2026-11-20T12:00:00.000Z"},
        {"stepId": 2, "title": "secret second", "status": "pending"},
    ],
}
ITEMS: dict[str, Any] = {"value": ["secret item"], "slice": {"itemType": "str", "policy": "state"}}
LOG: dict[str, Any] = {"value": ["one"], "slice": {"itemType": "str", "policy": "log"}}
STATE = {"perdure.plan": {"value": PLAN}, "perdure.slice/found": ITEMS, "perdure.slice/log": LOG, "cart": {"value": 1}}
#: What only the owner of a session may ask.
PATHS = ("plan", "snapshot", "checkpoints", "checkpoints/chk_1")


async def idle(api: Api) -> dict[str, Any]:
    """A session whose first turn has ended."""
    session = await api.create()
    session_id = session["sessionId"]
    await api.store.commit(Commit(session_id, consume=Consumption(0, [session["deliveryId"]])))
    await ended_turn(api, session_id)
    return session


async def take(api: Api, session_id: str, number: int = 1, *, cart: int = 1, name: str | None = None) -> None:
    slots = [SlotWrite(name, value) for name, value in {**STATE, "cart": {"value": cart}}.items()]
    checkpoint = NewCheckpoint(f"chk_{number}", 0, 0, name, 1)
    await api.store.commit(Commit(session_id, slots=slots, checkpoint=checkpoint))


async def write(api: Api, session_id: str, name: str, value: dict[str, Any]) -> None:
    await api.store.commit(Commit(session_id, slots=[SlotWrite(name, value)]))


async def get(api: Api, session_id: str, path: str, **headers: str) -> httpx2.Response:
    return await api.http.get(f"/v1/sessions/{session_id}/{path}", headers=headers)


async def roll_back(api: Api, session_id: str, checkpoint_id: str = "chk_1", **fields: Any) -> httpx2.Response:
    return await api.http.post(f"/v1/sessions/{session_id}/rollback", json={"checkpointId": checkpoint_id, **fields})


async def values(api: Api, session_id: str) -> dict[str, Any]:
    return {name: slot.value for name, slot in (await api.store.slots(session_id)).items()}


async def told(api: Api, session_id: str) -> list[str]:
    return [event.type for event in await api.store.events(session_id)]


# --- what is shown ------------------------------------------------------------------------------------------


async def test_the_plan_is_shown_as_it_is_now(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    before = await get(api, session_id, "plan")
    await take(api, session_id)
    newer = {**PLAN, "ofANewerBuild": True}
    shown = (await get(api, session_id, "plan")).json()
    await write(api, session_id, "perdure.plan", {"version": 2, "data": newer})

    assert before.json() == {"plan": None}
    assert before.headers["cache-control"] == "no-store"
    assert shown == {"plan": PLAN}
    assert (await get(api, session_id, "plan")).json() == {"plan": newer}


async def test_a_session_without_a_plan_has_none_again_after_a_rollback(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await api.store.commit(Commit(session_id, checkpoint=NewCheckpoint("chk_1", 0, 0)))
    await write(api, session_id, "perdure.plan", {"value": PLAN})

    await roll_back(api, session_id)

    assert (await get(api, session_id, "plan")).json() == {"plan": None}


async def test_checkpoints_are_listed_newest_first_and_page_by_page(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    for number in range(1, 6):
        await take(api, session_id, number, name="half" if number == 1 else None)

    first = (await get(api, session_id, "checkpoints?limit=2")).json()
    second = (await get(api, session_id, f"checkpoints?limit=2&cursor={first['nextCursor']}")).json()
    last = (await get(api, session_id, f"checkpoints?limit=2&cursor={second['nextCursor']}")).json()
    whole = (await get(api, session_id, "checkpoints?limit=5")).json()

    assert whole == {"checkpoints": [*first["checkpoints"], *second["checkpoints"], *last["checkpoints"]]}
    assert [each["number"] for each in whole["checkpoints"]] == [5, 4, 3, 2, 1]
    found = await api.store.checkpoints.find(session_id, "chk_1")
    assert found is not None
    [oldest] = last["checkpoints"]
    assert oldest == {
        "checkpointId": "chk_1",
        "number": 1,
        "name": "half",
        "planStep": 1,
        "turnId": "turn_0",
        "stepIndex": 0,
        "takenAt": found.taken_at,
        "bytes": found.size,
    }
    assert "name" not in whole["checkpoints"][0]
    for query in ("limit=0", "limit=x", "cursor=x", "cursor=-1", f"cursor={'9' * 40}"):
        assert (await get(api, session_id, f"checkpoints?{query}")).status_code == 400


async def test_a_page_goes_on_after_a_checkpoint_that_is_kept_no_more(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    for number in range(1, 4):
        await take(api, session_id, number)
    cursor = (await get(api, session_id, "checkpoints?limit=1")).json()["nextCursor"]
    for number in range(4, UNNAMED_KEPT + 5):
        await take(api, session_id, number)

    after = await get(api, session_id, f"checkpoints?cursor={cursor}")

    assert after.json() == {"checkpoints": []}


async def test_one_checkpoint_has_its_snapshot(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)
    [listed] = (await get(api, session_id, "checkpoints")).json()["checkpoints"]
    await write(api, session_id, "cart", {"value": 2})

    answer = await get(api, session_id, "checkpoints/chk_1")
    missing = await get(api, session_id, "checkpoints/chk_2")
    strange = await get(api, session_id, "checkpoints/%00")

    found = answer.json()
    snapshot = found.pop("snapshot")
    assert found == listed
    assert (snapshot["slots"], snapshot["plan"], snapshot["version"]) == ({"cart": 1}, PLAN, "1")
    assert [each["name"] for each in snapshot["slices"]] == ["found", "log"]
    for refused in (missing, strange):
        assert (refused.status_code, refused.json()["code"]) == (404, "checkpoint_not_found")


async def test_the_state_now_is_shown_and_not_kept(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)
    await write(api, session_id, "cart", {"value": 2})

    shown = (await get(api, session_id, "snapshot")).json()

    assert (shown["slots"], shown["sessionId"], shown["turn"]) == ({"cart": 2}, session_id, 0)
    assert len((await get(api, session_id, "checkpoints")).json()["checkpoints"]) == 1


async def test_only_the_owner_sees_and_rolls_back(people: Api) -> None:
    session_id = (await idle(people))["sessionId"]
    await take(people, session_id)
    await write(people, session_id, "cart", {"value": 2})
    bob = known_as("bob")

    seen = [await get(people, session_id, path, **bob) for path in PATHS]
    unknown = [await get(people, "ses_unknown", path) for path in PATHS]
    path, body = f"/v1/sessions/{session_id}", {"checkpointId": "chk_1"}
    refused = [
        await people.http.post(f"{path}/rollback", json=body, headers=bob),
        await people.http.post(f"{path}/rollback", json={}, headers=bob),
        await people.http.post(f"{path}/fork", json={"checkpoint": "chk_1"}, headers=bob),
        await people.http.patch(path, json={"tags": {"a": "b"}}, headers=bob),
    ]

    assert {answer.status_code for answer in (*seen, *unknown, *refused)} == {404}
    assert len({answer.text for answer in (*seen, *unknown, *refused)}) == 1
    assert (await values(people, session_id))["cart"] == {"value": 2}
    assert [(await get(people, session_id, path)).status_code for path in PATHS] == [200] * 4


# --- the way back -------------------------------------------------------------------------------------------


async def test_a_rollback_answers_with_the_session_and_so_does_a_repetition(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)
    await write(api, session_id, "cart", {"value": 2})
    await write(api, session_id, "perdure.slice/log", {**LOG, "value": ["one", "two"]})

    first = await roll_back(api, session_id)
    again = await roll_back(api, session_id)
    now = await values(api, session_id)
    with_logs = await roll_back(api, session_id, includeLogs=True)

    assert (first.status_code, first.json()["sessionId"]) == (200, session_id)
    assert again.content == first.content
    assert (now["cart"], now["perdure.slice/log"]["value"]) == ({"value": 1}, ["one", "two"])
    assert with_logs.status_code == 200
    assert (await values(api, session_id))["perdure.slice/log"]["value"] == ["one"]
    [listed] = (await api.http.get("/v1/sessions")).json()["sessions"]
    assert listed == with_logs.json()
    assert (await told(api, session_id)).count("session.rolled_back") == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"checkpointId": ""},
        {"checkpointId": 1},
        {"checkpointId": "chk_1", "includeLogs": "yes"},
        {"checkpointId": "chk_1", "include_logs": True},
    ],
)
async def test_a_rollback_that_is_not_understood_changes_nothing(api: Api, body: dict[str, Any]) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)
    await write(api, session_id, "cart", {"value": 2})

    answer = await api.http.post(f"/v1/sessions/{session_id}/rollback", json=body)

    assert answer.status_code == 400
    assert (await values(api, session_id))["cart"] == {"value": 2}


async def test_a_busy_session_an_unknown_checkpoint_and_the_end_are_said(api: Api) -> None:
    session = await idle(api)
    session_id = session["sessionId"]
    await take(api, session_id)

    unknown = [await roll_back(api, session_id, each) for each in ("chk_2", "\0", "é")]
    delivery = (await api.deliver(session)).json()["deliveryId"]
    queued = await roll_back(api, session_id)
    consume = Consumption(1, [delivery])
    started = (of_turn(1, "started", EventType.TURN_STARTED),)
    await api.store.commit(
        Commit(session_id, consume=consume, events=started, change=SessionChange(status="running", turns=2))
    )
    running = await roll_back(api, session_id)
    await api.store.commit(Commit(session_id, close=True, change=SessionChange(status="completed")))
    ended = await roll_back(api, session_id)

    assert [(each.status_code, each.json()["code"]) for each in unknown] == [(404, "checkpoint_not_found")] * 3
    for busy in (queued, running):
        assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
    assert (ended.status_code, ended.json()["code"]) == (409, "session_not_active")
    assert "session.rolled_back" not in await told(api, session_id)
    # What was kept of it can still be looked at.
    assert (await get(api, session_id, "checkpoints/chk_1")).status_code == 200


async def test_a_snapshot_of_a_newer_build_is_refused_and_changes_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = (await idle(api))["sessionId"]
    monkeypatch.setattr("perdure.store.engine.history.checkpoints.SNAPSHOT_VERSION", "2")
    await take(api, session_id)
    await write(api, session_id, "cart", {"value": 2})
    monkeypatch.undo()

    answer = await roll_back(api, session_id)

    assert (answer.status_code, answer.json()["code"]) == (409, "restore_refused")
    assert (await values(api, session_id))["cart"] == {"value": 2}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def on_each_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[tuple[Api, Api]]:
    """Two API processes' worth of server over one store."""
    on_postgres = request.param == "postgres"
    url = request.getfixturevalue("postgres_url") if on_postgres else None
    async with serving(tmp_path, database=url) as first, serving(tmp_path, database=url) as second:
        yield first, second


async def test_of_a_rollback_and_a_message_at_the_same_time_one_is_seen_to_be_first(
    on_each_store: tuple[Api, Api],
) -> None:
    api, other = on_each_store

    async def after(reads: int, api: Api, call: Awaitable[httpx2.Response]) -> httpx2.Response:
        for _ in range(reads):
            await api.http.get("/v1/sessions/ses_unknown/plan")
        return await call

    for reads in range(-2, 8):
        session = await idle(api)
        session_id = session["sessionId"]
        await take(api, session_id)
        await write(api, session_id, "cart", {"value": 2})
        before = await told(api, session_id)

        # From one that is surely first to the other one.
        said, rolled = await asyncio.gather(
            after(-reads, other, other.deliver(session)), after(reads, api, roll_back(api, session_id))
        )

        assert said.status_code == 200
        row = await api.store.session(session_id)
        assert row is not None
        now, new = (await values(api, session_id))["cart"], (await told(api, session_id))[len(before) :]
        if rolled.status_code == 200:
            assert (now, new, len(row.notes)) == ({"value": 1}, ["session.rolled_back"], 1)
        else:
            assert (rolled.status_code, rolled.json()["code"]) == (409, "session_busy")
            assert (now, new, row.notes) == ({"value": 2}, [], ())


# --- forks --------------------------------------------------------------------------------------------------


async def test_a_fork_begins_where_a_checkpoint_was_taken(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)
    path, key = f"/v1/sessions/{session_id}/fork", {"idempotency-key": "k"}

    first = await api.http.post(path, json={"checkpoint": "chk_1"}, headers=key)
    for number in range(2, UNNAMED_KEPT + 3):
        await take(api, session_id, number)
    # The checkpoint is not kept any more.
    again = await api.http.post(path, json={"checkpoint": "chk_1"}, headers=key)
    late = await api.http.post(path, json={"checkpoint": "chk_1"})
    other = await api.http.post(path, json={"turn": 0, "step": 0}, headers=key)

    assert first.status_code == 201
    assert first.json()["parent"] == {"sessionId": session_id, "turn": 0, "step": 0}
    assert (again.status_code, again.content) == (201, first.content)
    assert (late.status_code, late.json()["code"]) == (404, "checkpoint_not_found")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


@pytest.mark.parametrize(
    "body", [{"checkpoint": 1}, {"checkpoint": ""}, {"checkpoint": "chk_1", "turn": 0}, {"checkpoint": None}]
)
async def test_a_fork_is_at_a_place_or_at_a_checkpoint(api: Api, body: dict[str, Any]) -> None:
    session_id = (await idle(api))["sessionId"]
    await take(api, session_id)

    assert (await api.http.post(f"/v1/sessions/{session_id}/fork", json=body)).status_code == 400


async def test_a_checkpoint_at_no_boundary_is_refused_with_one(api: Api) -> None:
    session_id = (await idle(api))["sessionId"]
    await api.emit(session_id, change=SessionChange(status="running", turns=2))
    await api.store.commit(Commit(session_id, checkpoint=NewCheckpoint("chk_1", 1, 0)))

    answer = await api.http.post(f"/v1/sessions/{session_id}/fork", json={"checkpoint": "chk_1"})

    refused = answer.json()
    assert (answer.status_code, refused["code"]) == (409, "fork_boundary_not_offered")
    assert (refused["reason"], refused["nearest"]) == ("step_not_ended", {"turn": 0})


# --- tags ---------------------------------------------------------------------------------------------------


async def test_tags_are_given_changed_shown_and_looked_for(api: Api) -> None:
    first = (await api.create(tags={"job": "nightly", "team": "a:b"}))["sessionId"]
    await api.create()

    changed = await api.http.patch(f"/v1/sessions/{first}", json={"tags": {"job": None, "who": "ada"}})
    found = [
        [each["sessionId"] for each in (await api.http.get("/v1/sessions", params={"tag": tag})).json()["sessions"]]
        for tag in ("job:nightly", "team:a:b", "who:ada", "who:bob")
    ]

    assert changed.status_code == 200
    assert changed.json()["tags"] == {"team": "a:b", "who": "ada"}
    assert (await api.http.get(f"/v1/sessions/{first}")).json()["tags"] == {"team": "a:b", "who": "ada"}
    assert found == [[], [first], [first], []]
    assert (await api.http.patch(f"/v1/sessions/{first}", json={"tags": {}})).json() == changed.json()
    gone = await api.http.patch(f"/v1/sessions/{first}", json={"tags": {"team": None, "who": None}})
    assert "tags" not in gone.json()


@pytest.mark.parametrize(
    "tags",
    [
        {"": "x"},
        {"a:b": "x"},
        {"é": "x"},
        {"a\n": "x"},
        {"a" * 65: "x"},
        {"a": "x" * 257},
        {"a": 1},
        {f"t{number}": "x" for number in range(21)},
        ["a"],
        "a",
    ],
)
async def test_tags_are_few_short_texts_under_plain_names(api: Api, tags: Any) -> None:
    session_id = (await api.create())["sessionId"]

    created = await api.http.post("/eve/v1/session", json={"message": "hello", "tags": tags})
    changed = await api.http.patch(f"/v1/sessions/{session_id}", json={"tags": tags})

    assert (created.status_code, changed.status_code) == (400, 400)


@pytest.mark.parametrize("body", [{}, {"tags": None}, {"tags": {}, "title": "x"}])
async def test_only_tags_can_be_changed(api: Api, body: dict[str, Any]) -> None:
    session_id = (await api.create())["sessionId"]

    assert (await api.http.patch(f"/v1/sessions/{session_id}", json=body)).status_code == 400


@pytest.mark.parametrize("query", ["tag=job", "tag=:x", "tag=a%20b:x", "tag=a:b&tag=c:d", f"tag=a:{'x' * 257}"])
async def test_a_tag_is_looked_for_by_its_name_and_text(api: Api, query: str) -> None:
    assert (await api.http.get(f"/v1/sessions?{query}")).status_code == 400


async def test_the_same_key_with_other_tags_is_another_request(api: Api) -> None:
    key = {"idempotency-key": "k"}
    answers = [
        await api.http.post("/eve/v1/session", json={"message": "hello", "tags": tags}, headers=key)
        for tags in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "2"}, {})
    ]

    assert [answer.status_code for answer in answers] == [202, 202, 409, 409]
    assert answers[0].content == answers[1].content


# --- the timeline, and what is hidden -----------------------------------------------------------------------


async def progressed(api: Api) -> str:
    session_id = (await idle(api))["sessionId"]
    planned = of_turn(0, "plan/call_1", EventType.PLAN_UPDATED)
    planned = planned.model_copy(update={"data": {**(planned.data or {}), "plan": PLAN, "changed": [1, 2]}})
    await api.emit(session_id, planned)
    await take(api, session_id, name="half")
    await write(api, session_id, "cart", {"value": 2})
    assert (await roll_back(api, session_id)).status_code == 200
    return session_id


async def test_the_timeline_shows_steps_by_their_ids_and_checkpoints(api: Api) -> None:
    session_id = await progressed(api)

    answer = await get(api, session_id, "timeline")

    entries = [(each["type"], each["data"]) for each in answer.json()["entries"] if "index" in each]
    place = {"turnId": "turn_0", "stepIndex": 0}
    checkpoint = {**place, "checkpointId": "chk_1", "name": "half"}
    assert entries == [
        ("plan.updated", {"turnId": "turn_0", "changed": [1, 2]}),
        ("checkpoint.created", {**checkpoint, "planStep": 1}),
        ("session.rolled_back", checkpoint),
    ]
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "redact",
    [
        "plan.updated,actions.requested,action.input.appended,action.result,subagent.completed",
        "actions.requested,action.input.appended",
        "action.result,subagent.completed",
    ],
)
async def test_who_hides_what_tools_get_or_return_hides_the_plan(tmp_path: Path, redact: str) -> None:
    async with serving(tmp_path, stream_redact=redact) as api:
        session_id = await progressed(api)

        paths = (*PATHS, "events", "events?types=plan.updated", "transcript?format=events", "timeline")
        texts = [(await get(api, session_id, path)).text for path in paths]
        texts.append((await api.http.get(f"/eve/v1/session/{session_id}/stream?follow=false")).text)
        plan = (await get(api, session_id, "plan")).json()["plan"]
        snapshot = (await get(api, session_id, "snapshot")).json()

    assert not [text for text in texts if "secret" in text]
    assert plan["objective"] == "[redacted]"
    assert [(each["stepId"], each["status"], each["title"]) for each in plan["steps"]] == [
        (1, "done", "[redacted]"),
        (2, "pending", "[redacted]"),
    ]
    assert snapshot["slots"] == {"cart": "[redacted]"}
    assert [each["items"] for each in snapshot["slices"]] == [["[redacted]"], ["[redacted]"]]
