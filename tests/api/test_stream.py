"""Reading a session's events."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.stream.broadcast import Pace
from perdure.errors import Unavailable
from perdure.protocol.events import EventType, NewEvent
from perdure.store.values import SessionChange
from tests.api.served import URL, Api, serving, session_ended, step, text_delta, turn_events
from tests.support.processes import PATIENCE
from tests.support.waiting import until

ENDED = SessionChange(status="completed")


def refused(delivery_id: str) -> NewEvent:
    """What may still be written of an ended session."""
    return NewEvent(type=EventType.DELIVERY_REFUSED, key=f"session/refused/{delivery_id}")


REFUSED = refused("dlv_late")


async def talked(api: Api, *turns: list[str]) -> str:
    """A session that has had these turns."""
    session_id = (await api.create())["sessionId"]
    for number, pieces in enumerate(turns):
        await api.emit(session_id, *turn_events(number, pieces))
    return session_id


async def test_the_headers_are_those_of_the_contract(api: Api) -> None:
    session_id = await talked(api)

    async with api.stream(session_id) as reading:
        headers = reading.answer.headers

    assert reading.answer.status_code == 200
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["content-type"] == "application/x-ndjson; charset=utf-8"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-eve-session-id"] == session_id
    assert (headers["x-eve-stream-format"], headers["x-eve-stream-version"]) == ("ndjson", "16")


async def test_an_event_has_its_type_data_and_meta(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    await api.emit(session_id, *turn_events(0, deliveries=["dlv_1"]))

    async with api.stream(session_id) as reading:
        started, _, appended = await reading.events(3)

    assert started == {
        "data": {"sequence": 0, "turnId": "turn_0"},
        "type": "turn.started",
        "meta": {
            "at": started["meta"]["at"],
            "id": f"{session_id}:0",
            "index": 0,
            "deliveryIds": ["dlv_1"],
        },
    }
    assert appended["meta"]["attempt"] == 1
    assert appended["data"]["messageDelta"] == "Hel"


@pytest.mark.parametrize("output", ["\ud800", "\x00", 2**70, {"deep": [2**70]}])
async def test_any_output_of_a_tool_can_be_streamed(api: Api, output: Any) -> None:
    session_id = await talked(api)
    await api.emit(session_id, step(0, 0, "result/1", EventType.ACTION_RESULT, result={"output": output}))

    async with api.stream(session_id) as reading:
        event = await reading.event()

    assert event["data"]["result"]["output"] == output


async def test_an_event_without_data_has_no_data(api: Api) -> None:
    session_id = await talked(api)
    await api.emit(session_id, session_ended(), change=ENDED)

    async with api.stream(session_id) as reading:
        (event,) = await reading.rest()

    assert event.keys() == {"type", "meta"}


async def test_deltas_carry_the_text_so_far(api: Api) -> None:
    session_id = await talked(api, ["Hel", "lo ", "you"], ["Bye"])

    async with api.stream(session_id) as reading:
        events = await reading.events(9 + 7)

    texts = [event["data"]["messageSoFar"] for event in events if event["type"] == "message.appended"]
    assert texts == ["Hel", "Hello ", "Hello you", "Bye"]


async def test_reasoning_and_message_are_kept_apart(api: Api) -> None:
    session_id = await talked(api)
    thought = step(0, 0, "reason/1", EventType.REASONING_APPENDED, reasoningDelta="Hm")
    await api.emit(session_id, step(0, 0, "started", EventType.STEP_STARTED), thought, text_delta(0, 0, 0, "Yes"))

    async with api.stream(session_id, 1) as reading:
        first, second = await reading.events(2)

    assert first["data"]["reasoningSoFar"] == "Hm"
    assert second["data"]["messageSoFar"] == "Yes"


async def test_a_new_attempt_begins_its_text_anew(api: Api) -> None:
    session_id = await talked(api)
    await api.emit(
        session_id,
        step(0, 0, "started", EventType.STEP_STARTED),
        text_delta(0, 0, 0, "Once"),
        step(0, 0, "superseded", EventType.STEP_SUPERSEDED),
        text_delta(0, 0, 0, "Upon", attempt=2),
        text_delta(0, 0, 1, " a time", attempt=2),
    )

    texts: list[str] = []
    for start in (0, 4):
        async with api.stream(session_id, start) as reading:
            events = await reading.events(5 - start)
        texts.append(events[-1]["data"]["messageSoFar"])

    assert texts == ["Upon a time", "Upon a time"]


async def test_an_attempt_that_goes_on_adds_to_the_text_of_those_before(api: Api) -> None:
    session_id = await talked(api)
    recovered = step(0, 0, "g2/recovered", EventType.STEP_RECOVERED, attempt=2).model_copy(update={"attempt": 2})
    await api.emit(
        session_id,
        step(0, 0, "started", EventType.STEP_STARTED),
        text_delta(0, 0, 0, "Once"),
        recovered,
        text_delta(0, 0, 0, " upon", attempt=2),
        text_delta(0, 0, 1, " a time", attempt=2),
    )

    texts: list[list[str]] = []
    for start in range(5):
        async with api.stream(session_id, start) as reading:
            events = await reading.events(5 - start)
        texts.append([each["data"]["messageSoFar"] for each in events if each["type"] == "message.appended"])

    grown = ["Once", "Once upon", "Once upon a time"]
    assert texts == [grown, grown, grown[1:], grown[1:], grown[2:]]


async def test_a_retraction_counts_although_the_next_attempt_has_the_same_number(api: Api) -> None:
    """A session that was rebuilt counts the attempts at its step anew."""
    session_id = await talked(api)
    await api.emit(
        session_id,
        step(0, 0, "started", EventType.STEP_STARTED),
        text_delta(0, 0, 0, "Once"),
        step(0, 0, "superseded", EventType.STEP_SUPERSEDED),
        text_delta(0, 0, 1, "Upon"),
    )

    async with api.stream(session_id) as reading:
        events = await reading.events(4)

    assert events[-1]["data"]["messageSoFar"] == "Upon"


async def test_a_stream_from_any_index_is_the_rest_of_the_whole(api: Api) -> None:
    session_id = await talked(api, ["a", "b", "c"], ["d", "e"])
    await api.emit(session_id, session_ended(), change=ENDED)
    async with api.stream(session_id) as reading:
        whole = await reading.rest()

    for start in range(len(whole) + 1):
        async with api.stream(session_id, start) as reading:
            assert await reading.rest() == whole[start:]

    assert [event["meta"]["index"] for event in whole] == list(range(len(whole)))


async def test_a_reader_that_comes_in_the_middle_of_a_message_gets_all_of_its_text(api: Api) -> None:
    session_id = await talked(api)
    await api.emit(session_id, step(0, 0, "started", EventType.STEP_STARTED), text_delta(0, 0, 0, "Hel"))

    async with api.stream(session_id, 2) as reading:
        assert await reading.line() == ""
        await api.emit(session_id, text_delta(0, 0, 1, "lo"))
        event = await reading.event()

    assert event["data"]["messageSoFar"] == "Hello"


async def test_events_arrive_as_they_are_emitted(api: Api) -> None:
    session_id = await talked(api)

    async with api.stream(session_id) as reading:
        for number in range(3):
            await api.emit(session_id, *turn_events(number, []))
            assert [event["meta"]["index"] for event in await reading.events(6)] == list(
                range(number * 6, number * 6 + 6)
            )


async def test_a_start_past_the_tail_waits_for_its_event(api: Api) -> None:
    session_id = await talked(api, [])

    async with api.stream(session_id, 7) as reading:
        assert reading.answer.status_code == 200
        await api.emit(session_id, *turn_events(1, []))
        event = await reading.event()

    assert event["meta"]["index"] == 7


async def test_the_stream_ends_with_the_session(api: Api) -> None:
    session_id = await talked(api)

    async with api.stream(session_id) as reading:
        assert await reading.line() == ""
        await api.emit(session_id, session_ended(), change=ENDED)
        rest = await reading.rest()

    assert [event["type"] for event in rest] == ["session.completed"]


@pytest.mark.parametrize("start", [0, 1, 2, 100])
async def test_the_stream_of_a_finished_session_ends(api: Api, start: int) -> None:
    session_id = await talked(api)
    await api.emit(session_id, session_ended(), change=ENDED)

    async with api.stream(session_id, start) as reading:
        assert len(await reading.rest()) == max(0, 1 - start)


async def test_a_live_stream_ends_at_the_terminal_event_whatever_follows_it(api: Api) -> None:
    session_id = await talked(api)

    async with api.stream(session_id) as reading, asyncio.timeout(PATIENCE):
        assert await reading.line() == ""
        await api.emit(session_id, session_ended(), REFUSED, change=ENDED)
        rest = await reading.rest()

    assert [event["type"] for event in rest] == ["session.completed"]


@pytest.mark.parametrize(("start", "expected"), [(0, ["session.completed"]), (1, []), (2, [])])
async def test_the_stream_of_a_finished_session_is_its_log_up_to_the_terminal_event(
    api: Api, start: int, expected: list[str]
) -> None:
    session_id = await talked(api)
    await api.emit(session_id, session_ended(), change=ENDED)
    await api.emit(session_id, REFUSED)

    async with api.stream(session_id, start) as reading, asyncio.timeout(PATIENCE):
        assert [event["type"] for event in await reading.rest()] == expected


@pytest.mark.parametrize(("start", "expected"), [(0, 7), (5, 2), (50, 0)])
async def test_the_end_of_a_finished_session_is_found_however_much_follows_it(
    api: Api, start: int, expected: int
) -> None:
    session_id = await talked(api, [])
    refusals = [refused(f"dlv_{number}") for number in range(100)]
    await api.emit(session_id, session_ended(), *refusals, change=ENDED)

    async with api.stream(session_id, start) as reading, asyncio.timeout(PATIENCE):
        assert len(await reading.rest()) == expected


async def test_the_stream_of_an_unknown_session_is_404_at_once(api: Api) -> None:
    answer = await api.http.get(f"{URL}/ses_unknown/stream")

    assert (answer.status_code, answer.json()) == (404, {"error": "Session not found.", "ok": False})


@pytest.mark.parametrize(
    ("given", "first"),
    [("0", 0), ("3", 3), ("3.7", 3), ("2x", 2), (" 1", 1), ("+1", 1), ("-0", 0), ("007", 7), ("1e3", 1), ("0x5", 0)],
)
async def test_the_leading_integer_of_start_index_counts(api: Api, given: str, first: int) -> None:
    session_id = await talked(api, ["a", "b"])

    async with api.stream(session_id, given) as reading:
        assert (await reading.event())["meta"]["index"] == first


@pytest.mark.parametrize("given", ["", "x", "-1", "NaN", "٣", "9007199254740992", "9" * 5000, "Infinity", ".5"])
async def test_a_start_index_that_is_no_index_is_refused(api: Api, given: str) -> None:
    session_id = await talked(api, [])

    answer = await api.http.get(f"{URL}/{session_id}/stream", params={"startIndex": given})

    expected = {"error": "Expected startIndex to be a non-negative integer.", "ok": False}
    assert (answer.status_code, answer.json()) == (400, expected)


async def test_an_idle_stream_sends_blank_lines(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(heartbeat=0.05)) as api:
        session_id = await talked(api, [])
        async with api.stream(session_id) as reading:
            await reading.events(6)
            assert [await reading.line() for _ in range(3)] == ["", "", ""]
            await api.emit(session_id, *turn_events(1, []))
            assert (await reading.event())["meta"]["index"] == 6


async def test_a_reader_that_leaves_is_let_go_at_once(api: Api) -> None:
    session_id = await talked(api, [])

    async with api.stream(session_id) as reading:
        await reading.event()
        assert api.broadcasts.watched == 1

    await until(lambda: api.broadcasts.watched == 0)


async def test_many_readers_share_one_feed_and_each_gets_everything(api: Api) -> None:
    session_id = await talked(api, ["a"])

    async def read() -> list[dict[str, Any]]:
        async with api.stream(session_id) as reading:
            return await reading.rest()

    readers = [asyncio.create_task(read()) for _ in range(200)]
    await until(lambda: api.broadcasts.readers == 200)
    assert api.broadcasts.watched == 1
    for number in range(1, 4):
        await api.emit(session_id, *turn_events(number, ["b", "c"]))
    await api.emit(session_id, session_ended(), change=ENDED)

    first, *others = await asyncio.gather(*readers)
    assert len(first) == 7 + 3 * 8 + 1
    assert all(other == first for other in others)


async def test_a_tiny_ring_loses_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(ring_lines=2, page=3, chunk_bytes=100)) as api:
        session_id = await talked(api)
        async with api.stream(session_id) as reading:
            for number in range(20):
                await api.emit(session_id, *turn_events(number, ["a", "b", "c"]))
            await api.emit(session_id, session_ended(), change=ENDED)
            events = await reading.rest()

    assert [event["meta"]["index"] for event in events] == list(range(20 * 9 + 1))
    assert {event["data"]["messageSoFar"] for event in events if event["type"] == "message.appended"} == {
        "a",
        "ab",
        "abc",
    }


async def test_a_store_that_is_away_for_a_moment_delays_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, pace=Pace(retry=0.01)) as api:
        session_id = await talked(api)
        async with api.stream(session_id) as reading:
            assert await reading.line() == ""
            with monkeypatch.context() as patch:
                asked = failing(patch, api, Unavailable("away"))
                await api.emit(session_id, *turn_events(0, []))
                await until(lambda: asked[0] > 2)
            events = await reading.events(6)

    assert [event["meta"]["index"] for event in events] == list(range(6))


async def test_a_feed_that_breaks_is_a_cut_and_no_end(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = await talked(api)
    async with api.stream(session_id) as reading:
        assert await reading.line() == ""
        with monkeypatch.context() as patch:
            failing(patch, api, ValueError("a bug"))
            await api.emit(session_id, *turn_events(0, []))
            with pytest.raises(httpx2.RemoteProtocolError):
                await reading.rest()

    async with api.stream(session_id) as reading:
        assert (await reading.event())["meta"]["index"] == 0


def failing(patch: pytest.MonkeyPatch, api: Api, error: Exception) -> list[int]:
    """Make the store fail to read; counts how often it was asked."""
    asked = [0]

    async def events(*_: Any, **__: Any) -> Any:
        asked[0] += 1
        raise error

    patch.setattr(api.store, "events", events)
    return asked
