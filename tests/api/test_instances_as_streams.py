"""One stream over all sessions of an instance, and the conversation that it shows."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol.events import EventType, delivery_refused
from perdure.store.lifecycle import Keep
from perdure.store.values import Commit, Consumption, SessionChange
from tests.api.served import Api, serving, session_ended, step, text_delta, turn_events
from tests.api.test_agents_as_streams import AGENT, answered, prompt, read, session_of, settlements
from tests.support.processes import PATIENCE
from tests.support.waiting import until


async def ended(api: Api, session_id: str) -> None:
    """The session completes, as a worker writes it, when a turn has read all of its deliveries."""
    read = Consumption(0, [each.delivery_id for each in await api.store.unread(session_id)])
    end = SessionChange(status="completed")
    await api.store.commit(Commit(session_id, consume=read, events=[session_ended()], change=end, close=True))


async def test_a_page_of_large_events_ends_sooner(api: Api) -> None:
    receipt = await prompt(api)
    text = "x" * 200_000
    await answered(api, receipt["submissionId"], 0, *(text for _ in range(12)))

    sizes: list[int] = []
    read: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        page = await api.http.get(f"{AGENT}/42", params={"offset": offset})
        sizes.append(len(page.content))
        read += page.json()
        offset = page.headers["stream-next-offset"]
        if "stream-up-to-date" in page.headers:
            break

    # A page ends with the event that makes it a mebibyte; the message of the step repeats all twelve.
    assert len(sizes) == 4
    assert max(sizes) < 1_048_576 + 13 * len(text)
    assert [each["text"] for each in read if each["type"] == "text_delta"] == [text] * 12


async def test_the_end_of_a_session_is_read_after_it(api: Api) -> None:
    receipt = await prompt(api)
    await ended(api, await answered(api, receipt["submissionId"]))

    events = await read(api, offset=receipt["offset"])

    assert (events[-1]["type"], events[-1]["submissionId"]) == ("submission_settled", receipt["submissionId"])


async def test_a_reader_of_a_session_that_has_ended_goes_on_with_the_next_one(api: Api) -> None:
    first = await prompt(api)
    await answered(api, first["submissionId"])
    seen = await api.http.get(f"{AGENT}/42", params={"offset": "-1"})
    session_id = await session_of(api)
    await api.emit(session_id, *turn_events(1, ("Bye",), deliveries=["dlv_last"]))
    await ended(api, session_id)

    second = await prompt(api, message="more")
    successor = await session_of(api, 1)
    await api.emit(successor, *turn_events(0, ("Again",), deliveries=[second["submissionId"]]))

    offset, texts, pages = seen.headers["stream-next-offset"], "", 0
    while True:
        page = await api.http.get(f"{AGENT}/42", params={"offset": offset})
        texts += "".join(each["text"] for each in page.json() if each["type"] == "text_delta")
        offset, pages = page.headers["stream-next-offset"], pages + 1
        if "stream-up-to-date" in page.headers:
            break
    assert (second["offset"], offset) == (f"{1:016d}_{0:016d}", f"{1:016d}_{7:016d}")
    assert texts == "ByeAgain"
    assert [each["text"] for each in await read(api) if each["type"] == "text_delta"] == ["Again"]
    assert [each["text"] for each in await read(api, offset=second["offset"]) if each["type"] == "text_delta"] == [
        "Again"
    ]


async def test_readers_who_wait_go_on_with_the_next_session(api: Api) -> None:
    first = await prompt(api)
    session_id = await answered(api, first["submissionId"])
    offset = (await api.http.head(f"{AGENT}/42")).headers["stream-next-offset"]
    params = {"offset": offset, "live": "long-poll"}
    polling = asyncio.create_task(api.http.get(f"{AGENT}/42", params=params))

    async with api.http.stream("GET", f"{AGENT}/42", params={"offset": offset, "live": "sse"}) as reading:
        await ended(api, session_id)
        second = await prompt(api, message="more")
        await api.emit(await session_of(api, 1), *turn_events(0, ("Again",), deliveries=[second["submissionId"]]))
        shown = b""
        async for chunk in reading.aiter_bytes():
            shown += chunk
            if b'"submission_settled"' in shown:
                break
    polled = await polling

    [data] = [line for line in shown.splitlines() if line.startswith(b"data:[")]
    assert json.loads(data.removeprefix(b"data:")) == polled.json() == await read(api, offset=second["offset"])
    assert polled.json()[-1]["submissionId"] == second["submissionId"]


@pytest.mark.postgres
async def test_a_reader_of_another_process_goes_on_with_the_next_session(tmp_path: Path, postgres_url: str) -> None:
    async with (
        serving(tmp_path, database=postgres_url) as api,
        serving(tmp_path, database=postgres_url, long_poll_seconds=PATIENCE) as other,
    ):
        first = await prompt(api)
        await answered(api, first["submissionId"])
        offset = (await other.http.head(f"{AGENT}/42")).headers["stream-next-offset"]
        params = {"offset": offset, "live": "long-poll"}
        polling = asyncio.create_task(other.http.get(f"{AGENT}/42", params=params))

        await ended(api, await session_of(api))
        second = await prompt(api, message="more")
        await api.emit(await session_of(api, 1), *turn_events(0, ("Again",), deliveries=[second["submissionId"]]))
        polled = await polling

    assert settlements(polled.json()) == [(second["submissionId"], "completed")]


async def test_the_changes_of_the_next_session_come_after_those_of_the_one_before(api: Api) -> None:
    first = await prompt(api)
    session_id = await answered(api, first["submissionId"])
    before = await read(api, view="updates")
    await ended(api, session_id)
    second = await prompt(api, message="more")
    await api.emit(await session_of(api, 1), *turn_events(0, ("Again",), deliveries=[second["submissionId"]]))

    after = await read(api, view="updates")

    last, next = before[-1]["position"], after[0]["position"]
    assert (next["batch"], next["index"]) > (last["batch"], last["index"])
    assert not {each.get("messageId") for each in before} & {each.get("messageId") for each in after} - {None}


def conversation(changes: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """What the model has said, as Flue's client (1.0.0-beta.9) puts it together."""
    messages: dict[str, list[tuple[str, str]]] = {}
    for each in changes:
        match each["type"]:
            case "message-appended":
                message = each["message"]
                if message["role"] == "assistant":
                    messages[message["id"]] = [(part["type"], part["text"]) for part in message["parts"]]
            case "message-started":
                messages.setdefault(each["messageId"], [])
            case "message-delta":
                parts = messages[each["messageId"]]
                before = parts.pop()[1] if parts and parts[-1][0] == each["kind"] else ""
                parts.append((each["kind"], before + each["delta"]))
            case _:
                pass
    return list(messages.values())


async def interrupted(api: Api) -> str:
    """A turn whose first attempt has streamed a thought and some text, and whose second one says it."""
    receipt = await prompt(api)
    session_id = await session_of(api)
    begun, started, *_ = turn_events(0, deliveries=[receipt["submissionId"]])
    thought = step(0, 0, "g1/1", EventType.REASONING_APPENDED, reasoningDelta="Hm")
    superseded = step(0, 0, "g2/superseded", EventType.STEP_SUPERSEDED, attempt=2)
    await api.emit(session_id, begun, started, thought, text_delta(0, 0, 2, "He"), superseded)
    again = step(0, 0, "g2/1", EventType.REASONING_APPENDED, attempt=2, reasoningDelta="Hmm")
    await api.emit(session_id, again, text_delta(0, 0, 2, "Hello", attempt=2))
    return session_id


async def completed(api: Api, session_id: str) -> None:
    thought = step(0, 0, "reasoning", EventType.REASONING_COMPLETED, attempt=2, reasoning="Hmm")
    said = step(0, 0, "message", EventType.MESSAGE_COMPLETED, attempt=2, message="Hello", finishReason="stop")
    *_, end, boundary = turn_events(0)
    await api.emit(session_id, thought, said, step(0, 0, "completed", EventType.STEP_COMPLETED), end, boundary)


async def test_what_a_lost_worker_has_streamed_is_not_in_the_conversation(api: Api) -> None:
    session_id = await interrupted(api)
    meanwhile = await read(api, view="updates")
    await completed(api, session_id)

    after = await read(api, view="updates")

    expected = [[("reasoning", "Hmm"), ("text", "Hello")]]
    assert conversation(meanwhile) == expected
    assert conversation(after) == expected


async def test_a_conversation_is_whole_when_its_deltas_have_expired(api: Api) -> None:
    session_id = await interrupted(api)
    await completed(api, session_id)
    await api.emit(session_id, *turn_events(1, ("Bye",), deliveries=["dlv_2"]), change=SessionChange(turns=2))
    before = conversation(await read(api, view="updates"))

    await api.store.expire(Keep(deltas=-60.0), None, 100)
    changes = await read(api, view="updates")

    assert before == [[("reasoning", "Hmm"), ("text", "Hello")], [("text", "Bye")]]
    assert "Hm" not in [each.get("delta") for each in changes]
    assert conversation(changes) == before


async def test_a_reader_of_a_deleted_session_goes_on_with_the_next_one(api: Api) -> None:
    first = await prompt(api)
    session_id = await answered(api, first["submissionId"])
    await ended(api, session_id)
    await api.store.begin_deletion(session_id)
    await until(lambda: api.store.purge(session_id, 100))
    nothing = await api.http.get(f"{AGENT}/42")
    second = await prompt(api, message="more")

    old = await api.http.get(f"{AGENT}/42", params={"offset": f"{0:016d}_{3:016d}"})

    assert nothing.status_code == 404
    assert second["offset"] == old.headers["stream-next-offset"] == f"{1:016d}_{0:016d}"
    assert old.json() == []


async def test_a_repeated_prompt_is_told_where_its_refusal_is(api: Api) -> None:
    receipt = await prompt(api, **{"idempotency-key": "k"})
    session_id = await session_of(api)
    event = delivery_refused(receipt["submissionId"], "late", "Too late.")
    await api.emit(session_id, *turn_events(0))
    await api.store.refuse(session_id, receipt["submissionId"], "late", event)

    again = await prompt(api, **{"idempotency-key": "k"})

    [settled] = await read(api, offset=again["offset"])
    assert (settled["submissionId"], settled["outcome"]) == (receipt["submissionId"], "failed")


async def test_a_session_that_an_older_build_has_started_keeps_its_name(api: Api, tmp_path: Path) -> None:
    first = await prompt(api)
    session_id = await answered(api, first["submissionId"])
    database = sqlite3.connect(tmp_path / "test.db")
    with database:
        database.execute("DELETE FROM instances")
    database.close()

    events = await read(api)
    await ended(api, session_id)

    assert events[-1]["type"] == "submission_settled"
    assert await read(api) == events
    assert (await prompt(api, message="more"))["offset"] == f"{1:016d}_{0:016d}"
