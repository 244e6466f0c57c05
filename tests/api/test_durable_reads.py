"""What all reads of Durable Streams have in common, and the logs of runs."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.requests import Request
from starlette.types import Scope

from api.durable.joint import Joint
from api.durable.read import Head, Page, Reader, StreamNotFound, Timing
from api.durable.sources import EventLog, log_of_run
from api.routes.streams import WrittenStream
from api.stream.broadcast import Broadcasts
from perdure.protocol import names
from perdure.protocol.events import Event, NewEvent
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.streams import Created, NewStream, StreamRow, StreamStore
from perdure.store.values import Commit, SessionChange
from tests.api.served import Api, serving, turn_events
from tests.support import given
from tests.support.waiting import until

AGENT = "/agents/concierge/42"
STREAM = "/v1/stream/notes"


async def prompted(api: Api) -> str:
    """An instance whose first prompt is answered; its session."""
    answer = await api.http.post(AGENT, json={"message": "hello"})
    session_id = api.temporal.started[0]["id"]
    await api.emit(session_id, *turn_events(0, deliveries=[answer.json()["submissionId"]]))
    return session_id


async def head_of(api: Api) -> str:
    return (await api.http.head(AGENT)).headers["stream-next-offset"]


async def test_a_process_that_stops_ends_its_reads(api: Api) -> None:
    await prompted(api)
    offset = await head_of(api)
    polling = asyncio.create_task(api.http.get(AGENT, params={"offset": offset, "live": "long-poll"}))
    async with api.http.stream("GET", AGENT, params={"offset": offset, "live": "sse"}) as reading:
        chunks = reading.aiter_bytes()
        first = await anext(chunks)

        await api.broadcasts.close()
        rest = [chunk async for chunk in chunks]
        polled = await polling

    assert b"event: control" in first
    assert rest == []
    assert polled.status_code == 204
    assert polled.headers["stream-next-offset"] == offset


async def test_a_process_that_stops_answers_a_prompt_that_waits_with_its_receipt(api: Api) -> None:
    waiting = asyncio.create_task(api.http.post(f"{AGENT}?wait=result", json={"message": "hello"}))
    await until(lambda: bool(api.temporal.started))

    await api.broadcasts.close()
    answer = await waiting

    assert answer.status_code == 202
    assert answer.headers["location"] == f"{api.url}{AGENT}"


async def test_an_event_stream_of_a_deleted_stream_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on") as api:
        await api.http.put(STREAM, headers={"content-type": "text/plain"})
        async with api.http.stream("GET", STREAM, params={"offset": "-1", "live": "sse"}) as reading:
            chunks = reading.aiter_bytes()
            first = await anext(chunks)

            await api.http.delete(STREAM)
            rest = [chunk async for chunk in chunks]

        assert b'"upToDate":true' in first
        assert rest == []
        assert (await api.http.get(STREAM)).status_code == 404


class Purged(WrittenStream):
    """A stream that is deleted, with its items, after a reader has seen its head."""

    def __init__(self, store: StreamStore, row: StreamRow) -> None:
        super().__init__(store, row)
        self._place = (store, row)

    async def page(self, start: int, head: Head) -> Page:
        store, row = self._place
        await store.delete(row.owner, row.path)
        await store.sweep(1_000)
        return await super().page(start, head)


async def test_a_read_that_waits_ends_when_its_stream_is_purged_under_it(store: Store) -> None:
    stream = NewStream(stream_id="str_1", owner="ada", path="notes", content_type="text/plain", items=[b"a"])
    created = await store.streams.create(stream)
    assert isinstance(created, Created)
    reader = Reader(Broadcasts(store), Timing())
    query: Scope = {"query_string": b"offset=-1&live=long-poll", "headers": [], "method": "GET", "type": "http"}

    with pytest.raises(StreamNotFound):
        async with asyncio.timeout(5):
            await reader.respond(Request(query, receive=asyncio.Future), Purged(store.streams, created.row))


async def test_nothing_waits_for_a_client_that_has_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, long_poll_seconds=300) as api:
        await prompted(api)
        here, params = len(asyncio.all_tasks()), {"offset": await head_of(api), "live": "long-poll"}
        polls = [asyncio.create_task(api.http.get(AGENT, params=params)) for _ in range(20)]
        polls += [asyncio.create_task(api.http.post(f"{AGENT}?wait=result", json={"message": "a"})) for _ in range(5)]
        await until(lambda: len(asyncio.all_tasks()) > here + 2 * len(polls))

        for each in polls:
            each.cancel()

        await until(lambda: len(asyncio.all_tasks()) <= here)


async def test_many_readers_of_one_stream_read_the_store_together(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = await prompted(api)
    params, readers, pages = {"offset": await head_of(api), "live": "sse"}, 50, 0
    events = api.store.events

    async def counted(session_id: str, start: int = 0, limit: int = 500) -> Sequence[Event]:
        nonlocal pages
        pages += start == 8
        return await events(session_id, start, limit)

    async def first_data() -> bytes:
        async with api.http.stream("GET", AGENT, params=params) as reading:
            chunks = reading.aiter_bytes()
            arrived.release()
            while b"event: data" not in (chunk := await anext(chunks)):
                pass
            return chunk.split(b"\n\n")[0]

    arrived = asyncio.Semaphore(0)
    reading = [asyncio.create_task(first_data()) for _ in range(readers)]
    for _ in range(readers):
        await arrived.acquire()
    monkeypatch.setattr(api.store, "events", counted)
    await api.emit(session_id, *turn_events(1, deliveries=["dlv_2"]))
    read = await asyncio.gather(*reading)

    assert len(set(read)) == 1
    assert 1 <= pages <= readers / 5


async def test_a_call_that_has_begun_is_not_for_those_who_ask_later() -> None:
    joint, seen = Joint[int](), asyncio.Event()
    value = 1

    async def look() -> int:
        looked = value
        await seen.wait()
        return looked

    first = asyncio.create_task(joint("a", look))
    await until(lambda: not first.done() and joint.begun)
    value = 2
    later = [asyncio.create_task(joint("a", look)) for _ in range(3)]
    later[0].cancel()
    seen.set()

    assert await first == 1
    assert await asyncio.gather(*later[1:]) == [2, 2]


async def test_streams_that_callers_write_are_off_unless_they_are_wanted(api: Api) -> None:
    answer = await api.http.put(STREAM, headers={"content-type": "text/plain"})

    assert answer.status_code == 404


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on", max_body_bytes=1_000) as api:
        await api.http.put(STREAM, headers={"content-type": "text/plain"})

        large = await api.http.post(STREAM, content=b"a" * 1_001, headers={"content-type": "text/plain"})

    assert (large.status_code, large.json()["error"]["type"]) == (413, "too_large")


async def test_an_append_has_only_so_many_items(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on") as api:
        await api.http.put(STREAM, headers={"content-type": "application/json"})

        many = await api.http.post(STREAM, json=[1] * 10_001)
        head = await api.http.head(STREAM)

    assert (many.status_code, many.json()["error"]["type"]) == (413, "too_large")
    assert head.headers["stream-next-offset"].endswith("_0000000000000000")


async def test_what_a_caller_may_not_store_any_more_is_said(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on", max_streams=1, max_stream_bytes=1_000) as api:
        await api.http.put(STREAM, headers={"content-type": "text/plain"})

        many = await api.http.put(f"{STREAM}/2", headers={"content-type": "text/plain"})
        large = await api.http.post(STREAM, content=b"a" * 1_000, headers={"content-type": "text/plain"})

    assert (many.status_code, many.json()["error"]["type"]) == (413, "quota_reached")
    assert "at most 1:" in many.json()["error"]["message"]
    assert (large.status_code, large.json()["error"]["type"]) == (413, "quota_reached")
    assert "at most 1000 bytes" in large.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[12345678901234567890123]", '["\\ud800"]', "[0.1, -0.0, true, null]"])
async def test_values_of_a_stream_come_back_as_they_were(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path, streams="on") as api:
        await api.http.put(STREAM, headers={"content-type": "application/json"}, content=text.encode())

        answer = await api.http.get(STREAM)

    assert answer.text == text.replace(" ", "")


@pytest.mark.parametrize("text", ["[NaN]", "[1e999]", "[" * 200_000, "{", "[" + "9" * 5_000 + "]"])
async def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path, streams="on") as api:
        answer = await api.http.put(STREAM, headers={"content-type": "application/json"}, content=text.encode())

    assert answer.status_code in (400, 413)


# --- runs ---------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    opened = await open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    await opened.migrate()
    yield opened
    await opened.close()


def decoded(item: bytes) -> dict[str, Any]:
    return json.loads(item)


@dataclass(frozen=True)
class Recorded:
    """The record of a run, as far as its events do not repeat it."""

    input: Any
    result: Any
    started_at: str = "2026-01-01T00:00:00.000Z"
    duration_ms: int | None = 5


async def record(run_id: str) -> Recorded:
    return Recorded({"a": 1}, 3)


def run_event(kind: str, **data: object) -> NewEvent:
    return NewEvent(type=kind, key=names.session_key(kind), data=data)


async def test_a_run_is_closed_when_it_has_ended(store: Store) -> None:
    await store.create_session(given.session("run_1"))
    log = EventLog(store, log_of_run("run_1", record))
    await store.commit(Commit("run_1", events=[run_event("run.started", workflowName="nightly")]))
    open_head = await log.head()

    end = run_event("run.completed")
    await store.commit(Commit("run_1", events=[end], change=SessionChange(status="completed"), close=True))

    assert not open_head.closed
    assert (await log.head()).closed


async def test_a_run_is_told_in_the_words_of_flue(store: Store) -> None:
    await store.create_session(given.session("run_1"))
    events = [
        run_event("run.started", workflowName="nightly"),
        run_event("run.step.completed", name="fetch", position=0),
        run_event("run.log", level="warning", message="careful", attributes={"n": 1}),
        run_event("run.completed"),
    ]
    await store.commit(Commit("run_1", events=events))
    log = EventLog(store, log_of_run("run_1", record))

    shown = [decoded(item) for item in (await log.page(0, await log.head())).items]

    assert [(each["eventIndex"], each["type"]) for each in shown] == [
        (0, "run_start"),
        (1, "operation_start"),
        (1, "operation"),
        (2, "log"),
        (3, "run_end"),
    ]
    assert {each["runId"] for each in shown} == {"run_1"}
    assert (shown[0]["workflowName"], shown[0]["input"], shown[0]["payload"]) == ("nightly", {"a": 1}, {"a": 1})
    assert shown[1]["operationId"] == "0/fetch"
    assert shown[3]["level"] == "warn"
    assert (shown[4]["result"], shown[4]["isError"], shown[4]["durationMs"]) == (3, False, 5)
