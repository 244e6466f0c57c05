"""The timeline of a session: its log, and beside it what has happened to its deliveries and attempts, by time."""

import asyncio
import json
from typing import Any

import pytest

from api.stream.response import WholeStream
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.stream_policy import REDACTED, StreamPolicy
from perdure.runtime.reports.timeline import Beside, Entry, Timeline, merged
from perdure.store.values import Attempt, Commit, Consumption, Fence, Hold, SessionChange
from tests.api.asking import known_as
from tests.api.served import URL, Api, of_turn, session_ended, step, turn_events
from tests.api.test_events import sse
from tests.support import given
from tests.support.waiting import until


async def entries(api: Api, session_id: str, query: str = "") -> list[dict[str, Any]]:
    return (await api.http.get(f"/v1/sessions/{session_id}/timeline{query}")).json()["entries"]


async def types(api: Api, session_id: str) -> list[str]:
    return [each["type"] for each in await entries(api, session_id)]


def fence(hold: Hold, generation: int, *, turn: int = 0, scope: str = "model") -> Fence:
    return Fence(turn, 0, scope, Attempt(generation, generation * 1_000_000, worker=f"host:{generation}:b"), hold)


async def later() -> None:
    """Until the next millisecond, so that times differ."""
    await asyncio.sleep(0.003)


async def begin(api: Api, session: dict[str, Any], generation: int = 1) -> None:
    started = (of_turn(0, "started", EventType.TURN_STARTED), step(0, 0, "started", EventType.STEP_STARTED))
    consume = Consumption(0, [session["deliveryId"]])
    await api.store.commit(
        Commit(session["sessionId"], fence=fence(Hold.RAISE, generation), events=started, consume=consume)
    )
    await later()


async def test_what_happens_beside_the_events_stands_between_them(api: Api) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await later()
    await begin(api, session)
    busy = fence(Hold.RELEASE, 1)
    failed = busy.report("failed", {"type": "MODEL_CALL_FAILED", "message": "It answered 503."})
    await api.store.attempts.report(session_id, failed)
    await later()
    await begin(api, session, 2)
    events = turn_events(0)[4:]
    await api.store.commit(Commit(session_id, fence=fence(Hold.RELEASE, 2), events=events))

    found = await entries(api, session_id)

    assert [each["type"] for each in found] == [
        "delivery.queued",
        "turn.started",
        "step.started",
        "delivery.claimed",
        "attempt.started",
        "attempt.ended",
        "step.retrying",
        "attempt.started",
        "attempt.ended",
        "message.completed",
        "step.completed",
        "turn.completed",
        "session.waiting",
    ]
    assert [each["index"] for each in found if "index" in each] == [0, 1, 2, 3, 4, 5]
    assert [each["at"] for each in found] == sorted(each["at"] for each in found)
    first, _, retrying = found[4:7]
    assert first["data"] | {"attemptId": ""} == {
        "attemptId": "",
        "sessionId": session_id,
        "turnId": "turn_0",
        "stepIndex": 0,
        "scope": "model",
        "number": 1,
        "worker": "host:1:b",
    }
    assert (retrying["data"]["after"], retrying["data"]["reason"]) == (first["data"]["attemptId"], "MODEL_CALL_FAILED")


async def test_nothing_is_written_into_the_log_by_looking(api: Api) -> None:
    session = await api.create()
    await begin(api, session)
    before = await given.everything(api.store, session["sessionId"])

    await entries(api, session["sessionId"])

    assert await given.everything(api.store, session["sessionId"]) == before


async def test_pages_have_each_entry_once_and_in_order(api: Api) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await later()
    await begin(api, session)
    await api.store.commit(Commit(session_id, fence=fence(Hold.RELEASE, 1), events=turn_events(0)[4:]))
    for turn in (1, 2, 3):
        await later()
        started = turn_events(turn)[:2]
        await api.store.commit(Commit(session_id, fence=fence(Hold.RAISE, 1, turn=turn), events=started))
        await later()
        ended = Commit(session_id, fence=fence(Hold.RELEASE, 1, turn=turn), events=turn_events(turn)[4:])
        await api.store.commit(ended)
    whole = await entries(api, session_id)

    paged: list[Any] = []
    cursor = ""
    while True:
        answer = (await api.http.get(f"/v1/sessions/{session_id}/timeline?limit=3{cursor}")).json()
        paged += answer["entries"]
        if "nextCursor" not in answer:
            break
        cursor = f"&cursor={answer['nextCursor']}"

    def sorts(entries: list[Any]) -> list[str]:
        return sorted(str(each) for each in entries)

    assert sorts(paged) == sorts(whole)
    assert [each["index"] for each in paged if "index" in each] == [each["index"] for each in whole if "index" in each]


async def test_a_stream_of_all_events_shows_what_stands_beside_them_without_an_index(api: Api) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await later()
    await begin(api, session)
    async with sse(api, session_id, events="all") as frames:
        await frames.next()
        first = [await frames.next() for _ in range(5)]
        await api.store.commit(Commit(session_id, fence=fence(Hold.RELEASE, 1), events=turn_events(0)[4:]))
        rest = [await frames.next() for _ in range(5)]

    assert [(each.event, each.id) for each in first] == [
        ("delivery.queued", None),
        ("turn.started", "0"),
        ("step.started", "1"),
        ("delivery.claimed", None),
        ("attempt.started", None),
    ]
    assert [(each.event, each.id) for each in rest] == [
        ("attempt.ended", None),
        ("message.completed", "2"),
        ("step.completed", "3"),
        ("turn.completed", "4"),
        ("session.waiting", "5"),
    ]
    assert first[-1].data["meta"].keys() == {"at"}
    assert first[-1].data["data"]["worker"] == "host:1:b"


@pytest.mark.parametrize("committed", ["before the look", "after the look"])
async def test_what_is_committed_while_the_store_is_read_keeps_its_order(
    api: Api, monkeypatch: pytest.MonkeyPatch, committed: str
) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await later()
    await begin(api, session)
    entries = Beside.entries
    ending = Commit(session_id, fence=fence(Hold.RELEASE, 1), events=turn_events(0)[4:])

    async def slow(beside: Beside, since: str, until: str | None = None) -> tuple[list[Entry], bool]:
        if committed == "before the look":
            await api.store.commit(ending)
        found = await entries(beside, since, until)
        if committed == "after the look":
            await api.store.commit(ending)
        monkeypatch.setattr(Beside, "entries", entries)
        return found

    async with sse(api, session_id, events="all") as frames:
        await frames.next()
        for _ in range(5):
            await frames.next()
        monkeypatch.setattr(Beside, "entries", slow)
        rest = [(await frames.next()).event for _ in range(5)]

    assert rest == ["attempt.ended", "message.completed", "step.completed", "turn.completed", "session.waiting"]


async def test_what_happens_without_an_event_reaches_those_who_read_everything(api: Api) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await begin(api, session)
    async with sse(api, session_id, last=1, events="all") as frames:
        while (await frames.next()).event != "attempt.started":
            pass
        report = fence(Hold.KEEP, 1).report("failed", {"type": "X", "message": "x"})
        await api.store.attempts.report(session_id, report)

        ended = await frames.next()

    assert (ended.event, ended.id, ended.data["data"]["error"]["type"]) == ("attempt.ended", None, "X")


async def test_only_those_who_ask_for_it_see_more_than_the_log(api: Api) -> None:
    session = await api.create()
    session_id = session["sessionId"]
    await begin(api, session)
    ended = session_ended()
    await api.emit(session_id, ended, change=SessionChange(status="completed"))

    async def lines(query: str) -> list[str]:
        answer = await api.http.get(f"{URL}/{session_id}/stream{query}")
        return [line["type"] for line in map(json.loads, filter(None, answer.text.splitlines()))]

    assert await lines("") == ["turn.started", "step.started", "session.completed"]
    assert await lines("?events=log") == await lines("")
    everything = await lines("?events=all")
    assert [type for type in everything if type in await lines("")] == await lines("")
    assert {"delivery.queued", "delivery.claimed", "attempt.started"} < set(everything)
    assert (await api.http.get(f"{URL}/{session_id}/stream?events=some")).status_code == 400


async def test_the_streams_of_all_events_are_few(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeStream, "most", 1)
    session_id = (await api.create())["sessionId"]
    path = f"/v1/sessions/{session_id}/events/stream"
    async with sse(api, session_id, events="all") as frames:
        await frames.next()
        refused = await api.http.get(path, params={"events": "all"})
    await until(lambda: api.broadcasts.whole == 0, "the reader to be gone")

    assert refused.status_code == 503
    async with sse(api, session_id, events="all") as frames:
        await frames.next()


async def test_a_turn_that_asks_people_pauses_until_another_one_goes_on(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    asks = (
        of_turn(0, "started", EventType.TURN_STARTED),
        step(0, 0, "inputs", EventType.INPUT_REQUESTED, requests=[{"requestId": "inp_1", "prompt": "May I?"}]),
        of_turn(0, "completed", EventType.TURN_COMPLETED),
    )
    await api.emit(session_id, *asks)
    await api.emit(session_id, *turn_events(1))

    found = [each for each in await entries(api, session_id) if each["type"].startswith(("turn.", "input."))]

    assert [each["type"] for each in found] == [
        "turn.started",
        "input.requested",
        "turn.completed",
        "turn.paused",
        "turn.started",
        "turn.resumed",
        "turn.completed",
    ]
    assert found[3]["data"] == {"turnId": "turn_0", "reason": "input"}
    assert found[5]["data"] == {"turnId": "turn_0", "reason": "input", "by": "turn_1"}
    assert "May I?" not in str(found)
    # Also on a page that begins in between.
    page = await entries(api, session_id, "?cursor=2")
    assert [each["type"] for each in page][:2] == ["turn.started", "turn.resumed"]


async def test_a_session_that_needs_attention_pauses(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    for what in (EventType.SESSION_ATTENTION, EventType.SESSION_RECOVERED):
        await api.emit(session_id, NewEvent(type=what, key=what, data={"code": "AGENT_GONE", "message": "gone"}))

    found = (await entries(api, session_id))[1:]

    assert [(each["type"], each["data"].get("reason")) for each in found] == [
        ("session.attention", None),
        ("turn.paused", "AGENT_GONE"),
        ("session.recovered", None),
        ("turn.resumed", "AGENT_GONE"),
    ]


async def test_nothing_of_what_was_said_is_in_a_timeline(api: Api) -> None:
    session = await api.create("a secret")
    called = step(0, 0, "actions", EventType.ACTIONS_REQUESTED, actions=[{"callId": "c", "toolName": "t", "input": {"x": "a secret"}}])  # fmt: skip  # noqa: E501
    result = step(0, 0, "r", EventType.ACTION_RESULT, result={"callId": "c", "toolName": "t", "output": "a secret"}, status="completed")  # fmt: skip  # noqa: E501
    await api.emit(session["sessionId"], *turn_events(0, ["a secret"])[:-3], called, result)

    found = await entries(api, session["sessionId"])

    assert "a secret" not in str(found)
    assert found[-1]["data"]["status"] == "completed"
    assert found[-1]["data"]["toolName"] == "t"


async def test_what_a_deployment_does_not_show_of_results_it_does_not_show_of_attempts(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    call = fence(Hold.RAISE, 1, scope="call/c")
    await api.store.commit(Commit(session_id, fence=call))
    await api.store.attempts.report(session_id, call.report("failed", {"type": "X", "message": "a secret"}))

    hiding = StreamPolicy(redact=frozenset({EventType.ACTION_RESULT, EventType.SUBAGENT_COMPLETED}))
    page = await Timeline(api.store, hiding).page(session_id, None, 10)

    assert page.entries[-1].data["error"] == {"type": "X", "message": REDACTED}


async def test_an_attempt_that_ends_when_it_begins_ends_after_it_has_begun(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = (await api.create())["sessionId"]
    for each in (api.store, api.store.attempts):
        monkeypatch.setattr(each, "_now", lambda: "2099-01-01T00:00:00.000Z")
    call = fence(Hold.RAISE, 1, scope="call/c")
    await api.store.commit(Commit(session_id, fence=call))
    await api.store.attempts.report(session_id, call.report("failed", {"type": "X", "message": "It failed."}))

    assert (await types(api, session_id))[-2:] == ["attempt.started", "attempt.ended"]


async def test_only_the_owner_sees_a_timeline(people: Api) -> None:
    session_id = (await people.create())["sessionId"]

    answer = await people.http.get(f"/v1/sessions/{session_id}/timeline", headers=known_as("bob"))

    assert answer.status_code == 404
    assert LOCAL.owner


@pytest.mark.parametrize("query", ["?cursor=x", "?cursor=-1", "?limit=0", f"?cursor={'9' * 20}"])
async def test_what_is_no_page_of_a_timeline_is_refused(api: Api, query: str) -> None:
    session_id = (await api.create())["sessionId"]

    assert (await api.http.get(f"/v1/sessions/{session_id}/timeline{query}")).status_code == 400


def test_the_log_keeps_its_order_where_the_clocks_of_workers_differ() -> None:
    events = [Entry("12:05", "a", {}, 0), Entry("12:03", "b", {}, 1), Entry("12:06", "c", {}, 2)]
    beside = [Entry("12:04", "x", {}), Entry("12:05", "y", {}, rank=2)]

    assert [each.type for each in merged(events, beside)] == ["x", "a", "b", "y", "c"]


async def test_only_the_owner_sees_the_journal_of_a_turn(people: Api) -> None:
    session = await people.create()
    path = f"/v1/sessions/{session['sessionId']}/journal"
    assert (await people.http.get(path)).status_code == 404
    await begin(people, session)

    [step_of_turn] = (await people.http.get(path)).json()["steps"]
    other = await people.http.get(path, headers=known_as("bob"))
    unknown = await people.http.get(f"{path}?turn=3")

    assert (step_of_turn["phase"], step_of_turn["turnId"]) == ("before_provider", "turn_0")
    assert other.status_code == 404
    assert (unknown.status_code, unknown.json()["code"]) == (404, "turn_not_found")
