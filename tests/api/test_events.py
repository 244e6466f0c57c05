"""Reading a session's events as server-sent events and in pages: the same lines as in the NDJSON stream."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from api.stream.broadcast import Pace
from perdure.protocol.events import EventType, NewEvent
from perdure.store.values import SessionChange
from tests.api.served import Api, Reading, serving, session_ended, step, text_delta, turn_events

ENDED = SessionChange(status="completed")


@dataclass
class Frame:
    id: str | None = None
    event: str | None = None
    data: Any = None
    comments: list[str] = field(default_factory=list[str])
    retry: int | None = None


class Frames:
    """An open stream of server-sent events."""

    def __init__(self, reading: Reading) -> None:
        self.answer = reading.answer
        self._reading = reading

    async def next(self) -> Frame:
        frame = Frame()
        while line := await self._reading.line():
            name, _, value = line.partition(": ")
            match name:
                case "id":
                    frame.id = value
                case "event":
                    frame.event = value
                case "data":
                    frame.data = json.loads(value)
                case "retry":
                    frame.retry = int(value)
                case _:
                    frame.comments.append(line)
        return frame

    async def event(self) -> Frame:
        """The next frame that is an event of the log."""
        while (frame := await self.next()).id is None or frame.event is None:
            pass
        return frame

    async def rest(self) -> list[Frame]:
        frames: list[Frame] = []
        while True:
            try:
                frames.append(await self.next())
            except StopAsyncIteration:
                return frames


@asynccontextmanager
async def sse(api: Api, session_id: str, last: int | None = None, **params: Any) -> AsyncGenerator[Frames]:
    headers = {} if last is None else {"last-event-id": str(last)}
    url = f"/v1/sessions/{session_id}/events/stream"
    async with api.http.stream("GET", url, params=params, headers=headers) as answer:
        yield Frames(Reading(answer))


async def talked(api: Api, *turns: list[str], ended: bool = False) -> str:
    session_id = (await api.create())["sessionId"]
    for number, pieces in enumerate(turns):
        await api.emit(session_id, *turn_events(number, pieces))
    if ended:
        await api.emit(session_id, session_ended(), change=ENDED)
    return session_id


async def ndjson(api: Api, session_id: str, **params: Any) -> list[dict[str, Any]]:
    """The events that there are now."""
    answer = await api.http.get(f"/eve/v1/session/{session_id}/stream", params={"follow": "false", **params})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines() if line]


async def listed(api: Api, session_id: str, **params: Any) -> list[dict[str, Any]]:
    answer = await api.http.get(f"/v1/sessions/{session_id}/events", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["events"]


def indices(events: list[dict[str, Any]]) -> list[int]:
    return [event["meta"]["index"] for event in events]


# --- server-sent events ---------------------------------------------------------------------------------------


async def test_the_first_frame_says_how_far_the_log_is(api: Api) -> None:
    session_id = await talked(api, ["Hi"])

    async with sse(api, session_id) as frames:
        first = await frames.next()

    assert frames.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert frames.answer.headers["cache-control"] == "no-store, no-transform"
    assert (first.id, first.event, first.retry) == (None, "connected", 1000)
    assert first.data == {"sessionId": session_id, "tail": 6}


async def test_each_event_is_a_frame_with_its_index_and_its_type(api: Api) -> None:
    session_id = await talked(api, ["Hel", "lo"], ["Bye"], ended=True)
    lines = await ndjson(api, session_id)

    async with sse(api, session_id) as frames:
        _, *read = await frames.rest()

    assert [frame.data for frame in read] == lines
    assert [frame.id for frame in read] == [str(index) for index in range(len(lines))]
    assert [frame.event for frame in read] == [line["type"] for line in lines]


async def test_live_events_follow(api: Api) -> None:
    session_id = await talked(api)

    async with sse(api, session_id) as frames:
        await frames.next()
        await api.emit(session_id, *turn_events(0, ["new"]))
        started = await frames.event()

    assert (started.id, started.event) == ("0", "turn.started")


@pytest.mark.parametrize(("last", "after"), [(3, None), (None, 3), (3, 0)])
async def test_a_reader_resumes_after_what_it_has_read(api: Api, last: int | None, after: int | None) -> None:
    session_id = await talked(api, ["Hel", "lo"])

    async with sse(api, session_id, last, **({} if after is None else {"after": after})) as frames:
        first = await frames.event()

    assert first.id == "4"


async def test_a_filter_leaves_events_out_and_still_moves_the_place_to_resume(api: Api) -> None:
    session_id = await talked(api, ["Hel", "lo"], ended=True)

    async with sse(api, session_id, types="message.appended,message.completed", exclude="message.completed") as frames:
        _, *read = await frames.rest()

    assert [(frame.id, frame.event) for frame in read] == [
        ("2", "message.appended"),
        ("3", "message.appended"),
        ("8", None),
    ]
    assert [frame.data["data"]["messageSoFar"] for frame in read[:2]] == ["Hel", "Hello"]


async def test_who_has_read_an_ended_session_to_its_end_is_told_not_to_come_back(api: Api) -> None:
    session_id = await talked(api, ["Hi"], ended=True)
    # What follows the end is for operators.
    await api.emit(session_id, NewEvent(type=EventType.DELIVERY_REFUSED, key="session/refused/dlv_late"))

    answers = [
        await api.http.get(f"/v1/sessions/{session_id}/events/stream", headers={"last-event-id": str(last)})
        for last in (7, 8, 900)
    ]

    assert [answer.status_code for answer in answers] == [204, 204, 204]


async def test_an_idle_stream_has_heartbeats(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(comment=0.05)) as api:
        session_id = await talked(api)

        async with sse(api, session_id) as frames:
            await frames.next()
            beats = [(await frames.next()).comments for _ in range(2)]

    assert beats == [[": heartbeat"], [": heartbeat"]]


async def test_a_connection_ends_with_a_farewell_and_its_reader_loses_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(comment=0.02, lifetime=(0.05, 0.06))) as api:
        session_id = await talked(api)
        turns = [turn_events(number, [f"{number}"]) for number in range(4)]
        end = sum(len(events) for events in turns)
        read: list[str] = []
        last, farewells = None, 0
        # A busy machine may end a connection before it has brought anything: its reader comes again.
        while turns or len(read) < end:
            async with sse(api, session_id, last) as frames:
                if turns:
                    await api.emit(session_id, *turns.pop(0))
                for frame in await frames.rest():
                    if frame.id is not None:
                        read.append(frame.id)
                        last = int(frame.id)
                    elif frame.event == "disconnecting":
                        farewells += 1
                        assert frame.data == {"reason": "connection_cycle", "retryMs": 100}

    assert farewells >= 4
    assert read == [str(index) for index in range(end)]


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("after=x", {}),
        ("after=-1", {}),
        ("", {"last-event-id": "NaN"}),
        ("", {"last-event-id": "9" * 17}),
        ("types=", {}),
        ("types=" + ",".join("x" * 51), {}),
        ("exclude=%00", {}),
    ],
)
async def test_a_place_or_a_filter_that_is_none_is_refused(api: Api, query: str, headers: dict[str, str]) -> None:
    session_id = await talked(api)

    answer = await api.http.get(f"/v1/sessions/{session_id}/events/stream?{query}", headers=headers)

    assert (answer.status_code, answer.json()["ok"]) == (400, False)


@pytest.mark.parametrize("route", ["events", "events/stream"])
async def test_an_unknown_session_is_not_found(api: Api, route: str) -> None:
    answer = await api.http.get(f"/v1/sessions/ses_none/{route}")

    assert answer.status_code == 404


# --- pages ----------------------------------------------------------------------------------------------------


async def test_a_page_has_the_lines_of_the_stream(api: Api) -> None:
    session_id = await talked(api, ["Hel", "lo"], ["Bye"], ended=True)

    answer = await api.http.get(f"/v1/sessions/{session_id}/events")

    assert answer.json() == {"events": await ndjson(api, session_id), "hasMore": False}
    assert answer.headers["x-perdure-tail-index"] == "15"


async def test_pages_together_are_the_log(api: Api) -> None:
    session_id = await talked(api, ["a"] * 60, ["b"] * 60)
    whole = await ndjson(api, session_id)
    read: list[dict[str, Any]] = []
    more, after = True, None
    while more:
        params = {"limit": 7} | ({} if after is None else {"after": after})
        page = (await api.http.get(f"/v1/sessions/{session_id}/events", params=params)).json()
        read, more = read + page["events"], page["hasMore"]
        after = read[-1]["meta"]["index"]

    assert read == whole


async def test_the_last_events_come_first_when_asked(api: Api) -> None:
    session_id = await talked(api, ["a"] * 60, ["b"] * 60)
    whole = await ndjson(api, session_id)

    assert await listed(api, session_id, order="desc", limit=120) == whole[:-121:-1]
    assert await listed(api, session_id, order="desc", before=20, limit=3) == whole[19:16:-1]


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"after": 2, "before": 6}, [3, 4, 5]),
        ({"types": "turn.started"}, [0, 8]),
        ({"types": "turn.started,turn.completed"}, [0, 6, 8, 14]),
        ({"exclude": "message.appended", "turn": "turn_1"}, [8, 9, 12, 13, 14, 15]),
        ({"turn": "1", "limit": 2}, [8, 9]),
        ({"attempt": 2}, [16]),
        ({"deliveryId": "dlv_b"}, [17]),
        ({"deliveryId": "dlv"}, []),
        ({"around": 8, "window": 1}, [7, 8, 9]),
        ({"around": 0, "window": 2, "order": "desc"}, [2, 1, 0]),
        ({"after": 2**53 - 2}, []),
    ],
)
async def test_a_filter_chooses_events(api: Api, params: dict[str, Any], wanted: list[int]) -> None:
    session_id = await talked(api, ["Hel", "lo"], ["Hel", "lo"])
    late = step(2, 0, "late", EventType.STEP_COMPLETED, attempt=2)
    await api.emit(
        session_id, late, NewEvent(type=EventType.TURN_STARTED, key="k", turn=3, delivery_ids=("dlv_a", "dlv_b"))
    )
    if "types" in params:
        await api.emit(session_id, step(4, 0, "other", EventType.STEP_FAILED))

    found = [index for index in indices(await listed(api, session_id, **params)) if index != 17 or wanted == [17]]

    assert found == wanted


async def test_a_delta_has_the_text_so_far_whatever_is_left_out(api: Api) -> None:
    session_id = await talked(api)
    pieces = [text_delta(0, 0, index, text) for index, text in enumerate("abcdef")]
    await api.emit(session_id, step(0, 0, "started", EventType.STEP_STARTED), *pieces)

    back = await listed(api, session_id, types="message.appended", order="desc", limit=2)
    forth = await listed(api, session_id, types="message.appended", after=3)

    assert [event["data"]["messageSoFar"] for event in back] == ["abcdef", "abcde"]
    assert [event["data"]["messageSoFar"] for event in forth] == ["abcd", "abcde", "abcdef"]


async def test_a_page_of_large_events_ends_sooner(api: Api) -> None:
    session_id = await talked(api)
    large = "x" * 500_000
    await api.emit(session_id, *(step(0, n, "result", EventType.ACTION_RESULT, output=large) for n in range(20)))

    page = (await api.http.get(f"/v1/sessions/{session_id}/events")).json()

    assert page["hasMore"] is True
    assert 8 <= len(page["events"]) <= 10


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=x", "order=up", "turn=x", "turn=-1", "attempt=x", "after=x", "before=-1"),
        *("around=1&after=2", "around=1&limit=5", "window=3", "around=1&window=501", "deliveryId=%00", "types=%00"),
    ],
)
async def test_a_query_that_is_none_is_refused(api: Api, query: str) -> None:
    session_id = await talked(api)

    answer = await api.http.get(f"/v1/sessions/{session_id}/events?{query}")

    assert (answer.status_code, answer.json()["ok"]) == (400, False)


# --- bounded reads of NDJSON ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "wanted"), [(0, 7), (5, 2), (-1, 1), (-3, 3), (-900, 7), (7, 0), (900, 0)])
async def test_a_bounded_read_ends_at_what_there_is(api: Api, start: int, wanted: int) -> None:
    session_id = await talked(api, ["Hi"])

    read = await ndjson(api, session_id, startIndex=start)

    assert indices(read) == list(range(7 - wanted, 7))


@pytest.mark.parametrize("query", ["follow=x", "follow=false&startIndex=x", "startIndex=-1"])
async def test_a_bounded_read_from_nowhere_is_refused(api: Api, query: str) -> None:
    session_id = await talked(api)

    answer = await api.http.get(f"/eve/v1/session/{session_id}/stream?{query}")

    assert answer.status_code == 400
