"""One session, read in every form at once while it is written: all of them tell the same."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.api.served import Api, session_ended, turn_events
from tests.api.test_events import ENDED, sse

AGENT = "/agents/concierge/42"
TURNS = 6

Line = dict[str, Any]


async def ndjson(api: Api, session_id: str) -> list[Line]:
    async with api.http.stream("GET", f"/eve/v1/session/{session_id}/stream") as answer:
        return [json.loads(line) async for line in answer.aiter_lines() if line.strip()]


async def server_sent(api: Api, session_id: str) -> list[Line]:
    async with sse(api, session_id) as frames:
        return [frame.data for frame in await frames.rest() if frame.id is not None]


async def pages(api: Api, session_id: str) -> list[Line]:
    """Small pages, again and again until the session has ended."""
    found: list[Line] = []
    while not found or found[-1]["type"] != "session.completed":
        params = {"limit": 3, "after": found[-1]["meta"]["index"] if found else -1}
        answer = await api.http.get(
            f"/v1/sessions/{session_id}/events", params={k: v for k, v in params.items() if v >= 0}
        )
        found.extend(answer.json()["events"])
    return found


async def caught_up(api: Api, session_id: str) -> list[Line]:
    """What a Durable Stream has, page by page, until it has the last turn."""
    return await _durable(api, {})


async def polled(api: Api, session_id: str) -> list[Line]:
    return await _durable(api, {"live": "long-poll"})


async def _durable(api: Api, live: dict[str, str]) -> list[Line]:
    found: list[Line] = []
    offset = "-1"
    while not _is_over(found):
        answer = await api.http.get(AGENT, params={"offset": offset, **live})
        assert answer.status_code in (200, 204), answer.text
        offset = answer.headers["stream-next-offset"]
        found.extend(answer.json() if answer.content else ())
    return found


async def pushed(api: Api, session_id: str) -> list[Line]:
    found: list[Line] = []
    async with api.http.stream("GET", AGENT, params={"offset": "-1", "live": "sse"}) as answer:
        async for piece in _pieces(answer.aiter_lines()):
            found.extend(piece)
            if _is_over(found):
                return found
    raise AssertionError("the stream has ended before the last turn")


async def _pieces(lines: AsyncIterator[str]) -> AsyncGenerator[list[Line]]:
    kind, data = "", ""
    async for line in lines:
        name, _, value = line.partition(":")
        match name:
            case "event":
                kind = value.strip()
            case "data":
                data += value.removeprefix(" ")
            case "" if kind == "data":
                yield json.loads(data)
                kind, data = "", ""
            case "":
                kind, data = "", ""
            case _:
                pass


def _is_over(found: list[Line]) -> bool:
    return sum(each["type"] == "idle" for each in found) == TURNS


EVENTS: tuple[Callable[[Api, str], Awaitable[list[Line]]], ...] = (ndjson, server_sent, pages)
ELEMENTS: tuple[Callable[[Api, str], Awaitable[list[Line]]], ...] = (caught_up, polled, pushed)


@pytest.mark.parametrize("late", [False, True], ids=["while it is written", "afterwards"])
async def test_every_form_tells_the_same(api: Api, late: bool) -> None:
    answer = await api.http.post(AGENT, json={"message": "hello"})
    session_id, submission = api.temporal.started[0]["id"], answer.json()["submissionId"]

    async def write() -> None:
        for turn in range(TURNS):
            await api.emit(session_id, *turn_events(turn, ["Hel", "lo"], deliveries=[submission]))
        await api.emit(session_id, session_ended(), change=ENDED)

    if late:
        await write()
    reading = [asyncio.gather(*(read(api, session_id) for _ in range(5))) for read in (*EVENTS, *ELEMENTS)]
    if not late:
        await write()
    told = [each for readers in await asyncio.gather(*reading) for each in readers]

    events, elements = told[:15], told[15:]
    assert all(each == events[0] for each in events)
    assert all(each == elements[0] for each in elements)
    assert [line["meta"]["index"] for line in events[0]] == list(range(len(events[0])))
    # An index is the same number in each form.
    texts = {line["meta"]["index"]: line["data"].get("messageDelta") for line in events[0] if line.get("data")}
    shown = [(each["eventIndex"], each["text"]) for each in elements[0] if each["type"] == "text_delta"]
    assert shown == [(index, text) for index, text in texts.items() if text is not None]
    assert len(shown) == 2 * TURNS
