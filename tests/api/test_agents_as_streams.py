"""Prompts to named instances of agents, and their events as a Durable Stream."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, delivery_refused
from perdure.settings import Settings
from perdure.store.lifecycle import Keep
from perdure.store.values import Commit, Consumption, SessionChange
from tests.api.served import Api, of_turn, serving, session_ended, step, text_delta, turn_events
from tests.support.processes import PATIENCE
from tests.support.waiting import until

AGENT = "/agents/concierge"


async def prompt(api: Api, instance: str = "42", message: str = "hello", **headers: str) -> dict[str, Any]:
    answer = await api.http.post(f"{AGENT}/{instance}", json={"message": message}, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()


async def session_of(api: Api, number: int = 0) -> str:
    """The id of the session, as Temporal was asked to start it."""
    return api.temporal.started[number]["id"]


async def read(api: Api, instance: str = "42", **params: str) -> list[dict[str, Any]]:
    answer = await api.http.get(f"{AGENT}/{instance}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def answered(api: Api, submission: str, turn: int = 0, *pieces: str) -> str:
    """The turn that answers the prompt, as a worker writes it."""
    session_id = await session_of(api)
    await api.emit(session_id, *turn_events(turn, pieces or ("Hel", "lo"), deliveries=[submission]))
    return session_id


async def test_a_prompt_is_accepted_with_the_place_where_its_events_begin(api: Api) -> None:
    answer = await api.http.post(f"{AGENT}/42?x=1", json={"message": "hello"})

    receipt = answer.json()
    assert answer.status_code == 202
    assert receipt["streamUrl"] == f"{api.url}{AGENT}/42"
    assert receipt["offset"] == "0000000000000000_0000000000000000"
    assert receipt["submissionId"].startswith("dlv_")
    assert (answer.headers["location"], answer.headers["stream-next-offset"]) == (
        receipt["streamUrl"],
        receipt["offset"],
    )


async def test_a_second_prompt_goes_to_the_same_session_and_begins_where_that_is(api: Api) -> None:
    first = await prompt(api)
    await answered(api, first["submissionId"])

    second = await prompt(api, message="more")

    assert len(api.temporal.started) == 1
    assert second["offset"] == "0000000000000000_0000000000000008"


async def test_prompts_at_once_start_one_session(api: Api) -> None:
    receipts = await asyncio.gather(*(prompt(api, message=f"hello {number}") for number in range(8)))

    assert len({each["submissionId"] for each in receipts}) == 8
    assert len({each["id"] for each in api.temporal.started}) == 1


async def test_a_repeated_prompt_gets_its_first_receipt(api: Api) -> None:
    first = await prompt(api, **{"idempotency-key": "k"})

    second = await prompt(api, **{"idempotency-key": "k"})

    assert second == {**first, "deduplicated": True}


async def test_a_key_of_another_prompt_is_a_conflict(api: Api) -> None:
    await prompt(api, **{"idempotency-key": "k"})

    answer = await api.http.post(f"{AGENT}/42", json={"message": "other"}, headers={"idempotency-key": "k"})

    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "submission_conflict")


async def test_before_the_first_prompt_there_is_no_stream(api: Api) -> None:
    answer = await api.http.get(f"{AGENT}/42")

    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "stream_not_found")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"


async def test_the_name_of_another_caller_is_another_session(people: Api) -> None:
    await prompt(people)

    answer = await people.http.get(f"{AGENT}/42", headers={"x-who": "bob"})
    await prompt(people, **{"x-who": "bob"})

    assert answer.status_code == 404
    assert len({each["id"] for each in people.temporal.started}) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "type"),
    [
        (f"{AGENT}/42", {"message": ""}, 400, "invalid_request"),
        (f"{AGENT}/42", {"message": "a", "images": [{"type": "image", "data": "?", "mimeType": "image/png"}]}, 400, ""),
        (f"{AGENT}/42?wait=soon", {"message": "a"}, 400, "invalid_request"),
        (f"{AGENT}/eve", {"message": "a"}, 400, "invalid_request"),
        ("/agents/nobody/42", {"message": "a"}, 404, "agent_not_found"),
    ],
)
async def test_what_is_no_prompt_is_refused(api: Api, path: str, body: dict[str, Any], status: int, type: str) -> None:
    answer = await api.http.post(path, json=body)

    error = answer.json()["error"]
    assert answer.status_code == status
    assert error["type"] == (type or "invalid_request")
    assert error["message"]


async def test_bodies_and_methods_of_another_kind_are_refused(api: Api) -> None:
    text = await api.http.post(f"{AGENT}/42", content=b"hello", headers={"content-type": "text/plain"})
    broken = await api.http.post(f"{AGENT}/42", content=b"{", headers={"content-type": "application/json"})
    put = await api.http.put(f"{AGENT}/42", json={})

    assert (text.status_code, text.json()["error"]["type"]) == (415, "unsupported_media_type")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_json")
    assert (put.status_code, put.json()["error"]["type"]) == (405, "method_not_allowed")
    assert put.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("path", ["/agents", "/agents/concierge"])
async def test_where_nothing_is_the_answer_is_in_the_envelope(api: Api, path: str) -> None:
    answer = await api.http.get(path)

    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "route_not_found")


async def test_a_prefix_moves_the_routes_of_flue_and_no_others(tmp_path: Path) -> None:
    async with serving(tmp_path, flue_prefix="/flue") as api:
        prompt = await api.http.post(f"/flue{AGENT}/42", json={"message": "Hi"})
        run = await api.http.get("/flue/runs")
        elsewhere = [await api.http.get(path) for path in (f"{AGENT}/42", "/runs")]
        health = await api.http.get(f"{AGENT}/eve/v1/health")
        location = prompt.headers["location"]
        stream = await api.http.get(location, params={"offset": "-1"})

    assert (prompt.status_code, run.json(), health.status_code) == (202, {"runs": []}, 200)
    assert location == f"{api.url}/flue{AGENT}/42"
    assert stream.status_code == 200
    assert [answer.status_code for answer in elsewhere] == [404, 404]


@pytest.mark.parametrize("prefix", ["flue", "/flue/", "/", "//", "/{agent}", "/a b"])
def test_what_is_no_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="A prefix is a path like /flue"):
        Settings.model_validate({"flue_prefix": prefix})


async def test_an_image_is_a_file_of_the_message(api: Api) -> None:
    images = [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]
    await api.http.post(f"{AGENT}/42", json={"message": "look", "images": images})

    session_id = await session_of(api)
    unread = await api.store.unread(session_id)
    [row] = await api.store.deliveries(session_id, [unread[0].delivery_id])

    assert row.body is not None
    assert row.body["message"][1]["data"] == "aGk="


async def test_events_keep_their_indexes_in_the_words_of_flue(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])

    events = await read(api)

    assert [(each["eventIndex"], each["type"]) for each in events] == [
        (0, "operation_start"),
        (0, "agent_start"),
        (1, "turn_start"),
        (1, "message_start"),
        (2, "text_delta"),
        (3, "text_delta"),
        (4, "message_end"),
        (5, "turn"),
        (6, "operation"),
        (6, "idle"),
        (6, "submission_settled"),
    ]
    assert {each["v"] for each in events} == {3}
    assert {each["instanceId"] for each in events} == {"42"}
    assert {each["submissionId"] for each in events} == {receipt["submissionId"]}
    assert all(each["timestamp"] for each in events)
    assert events[4]["attempt"] == 1
    assert events[-1]["outcome"] == "completed"


async def test_pages_count_the_events_of_the_log_and_end_at_its_head(api: Api) -> None:
    receipt = await prompt(api)
    session_id = await answered(api, receipt["submissionId"], 0, *(f"{number} " for number in range(150)))
    head = 150 + 6

    first = await api.http.get(f"{AGENT}/42", params={"offset": "-1"})
    second = await api.http.get(f"{AGENT}/42", params={"offset": first.headers["stream-next-offset"]})

    row = await api.store.session(session_id)
    assert row is not None
    assert row.events == head
    assert first.headers["stream-next-offset"] == "0000000000000000_0000000000000100"
    assert "stream-up-to-date" not in first.headers
    assert second.headers["stream-next-offset"] == f"0000000000000000_{head:016d}"
    assert second.headers["stream-up-to-date"] == "true"
    assert "stream-closed" not in second.headers
    assert "".join(each["text"] for each in first.json() + second.json() if each["type"] == "text_delta").startswith(
        "0 1 2"
    )


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


async def test_the_tail_is_the_last_events(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])

    events = await read(api, offset="-1", tail="2")

    assert [each["type"] for each in events] == ["operation", "idle", "submission_settled"]


async def test_an_offset_beyond_the_end_is_gone(api: Api) -> None:
    await prompt(api)

    answer = await api.http.get(f"{AGENT}/42", params={"offset": "0000000000000000_0000000000000009"})

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (416, "stream_offset_gone")
    assert error["meta"]["nextOffset"] == "0000000000000000_0000000000000000"


@pytest.mark.parametrize(
    "query", ["offset=", "offset=5", "offset=1&offset=2", "live=sse", "tail=0", "live=x&offset=-1"]
)
async def test_a_read_that_cannot_be_meant_is_refused(api: Api, query: str) -> None:
    await prompt(api)

    answer = await api.http.get(f"{AGENT}/42?{query}")

    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request")


async def test_a_repeated_read_says_that_nothing_has_changed(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])
    first = await api.http.get(f"{AGENT}/42")

    again = await api.http.get(f"{AGENT}/42", headers={"if-none-match": first.headers["etag"]})
    weak = await api.http.get(f"{AGENT}/42", headers={"if-none-match": f'"x", W/{first.headers["etag"]}'})

    assert again.status_code == weak.status_code == 304
    assert again.headers["etag"] == weak.headers["etag"] == first.headers["etag"]


async def test_the_head_says_where_the_stream_is(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])

    answer = await api.http.head(f"{AGENT}/42")

    assert answer.status_code == 200
    assert answer.headers["stream-next-offset"] == "0000000000000000_0000000000000008"
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b""


async def test_a_long_poll_waits_for_the_next_event(api: Api) -> None:
    receipt = await prompt(api)
    polling = asyncio.create_task(
        api.http.get(f"{AGENT}/42", params={"offset": receipt["offset"], "live": "long-poll"})
    )

    await answered(api, receipt["submissionId"])
    answer = await polling

    assert answer.json()[0]["type"] == "operation_start"
    assert answer.headers["stream-cursor"].isdecimal()


async def test_an_event_stream_sends_data_with_its_position(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])

    async with api.http.stream("GET", f"{AGENT}/42", params={"offset": "-1", "live": "sse"}) as reading:
        first = await anext(reading.aiter_bytes())

    data, control, _ = first.decode().split("\n\n")
    assert data.startswith("event: data\ndata:[{")
    assert control.startswith('event: control\ndata:{"streamNextOffset":"0000000000000000_0000000000000008"')
    assert '"upToDate":true' in control


async def test_a_prompt_that_waits_gets_the_result(api: Api) -> None:
    waiting = asyncio.create_task(api.http.post(f"{AGENT}/42?wait=result", json={"message": "hello"}))
    await until(lambda: bool(api.temporal.started))
    session_id = await session_of(api)
    [unread] = await api.store.unread(session_id)
    await api.emit(session_id, *turn_events(0, ("Hel", "lo"), deliveries=[unread.delivery_id]))

    answer = await waiting

    assert answer.status_code == 200, answer.text
    result = answer.json()["result"]
    assert result["text"] == "Hello"
    assert result["usage"]["totalTokens"] == 0
    assert answer.json()["submissionId"] == unread.delivery_id


async def test_a_prompt_that_is_cancelled_before_its_turn_begins_is_settled_for_those_who_follow(api: Api) -> None:
    waiting = asyncio.create_task(api.http.post(f"{AGENT}/42?wait=result", json={"message": "hello"}))
    await until(lambda: bool(api.temporal.started))
    session_id = await session_of(api)
    [unread] = await api.store.unread(session_id)
    cancelled = await api.http.post(f"/eve/v1/session/{session_id}/cancel")
    async with api.http.stream("GET", f"{AGENT}/42", params={"offset": "-1", "live": "sse"}) as reading:
        chunks = reading.aiter_bytes()
        while b'"streamNextOffset":"0000000000000000_0000000000000001"' not in await anext(chunks):
            pass
        begun, *_ = turn_events(0, deliveries=[unread.delivery_id])
        await api.emit(session_id, begun, of_turn(0, "cancelled", EventType.TURN_CANCELLED))

        live = b""
        while b'"streamNextOffset":"0000000000000000_0000000000000003"' not in live:
            live += await anext(chunks)
    answer = await waiting

    assert cancelled.json()["status"] == "accepted"
    shown = json.loads(live.split(b"\n")[1].removeprefix(b"data:"))
    assert shown == await read(api)
    assert (shown[-1]["submissionId"], shown[-1]["outcome"]) == (unread.delivery_id, "aborted")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "submission_aborted")


async def test_a_prompt_that_fails_says_which_it_was(api: Api) -> None:
    waiting = asyncio.create_task(api.http.post(f"{AGENT}/42?wait=result", json={"message": "hello"}))
    await until(lambda: bool(api.temporal.started))
    session_id = await session_of(api)
    [unread] = await api.store.unread(session_id)
    begun, *_ = turn_events(0, deliveries=[unread.delivery_id])
    failed = of_turn(0, "failed", EventType.TURN_FAILED).model_copy(
        update={"data": {"code": "MODEL_CALL_FAILED", "message": "secret of the provider"}}
    )
    await api.emit(session_id, begun, failed)

    answer = await waiting

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "internal_error")
    assert error["meta"] == {"submissionId": unread.delivery_id}
    assert "secret" not in answer.text


async def test_a_prompt_is_settled_only_when_what_it_waits_for_is_done(api: Api) -> None:
    receipt = await prompt(api)
    session_id = await session_of(api)
    begun, started, *_ = turn_events(0, deliveries=[receipt["submissionId"]])
    parked = [begun, started, step(0, 0, "inputs", EventType.INPUT_REQUESTED, requests=[{"requestId": "inp_1"}])]
    end = of_turn(0, "completed", EventType.TURN_COMPLETED).model_copy(update={"step": 0})
    await api.emit(session_id, *parked, end)
    before = await read(api)
    await api.emit(session_id, *turn_events(1, ("Paid",), deliveries=["dlv_answer"]))

    after = await read(api)

    assert "submission_settled" not in [each["type"] for each in before]
    settled = [each["submissionId"] for each in after if each["type"] == "submission_settled"]
    assert settled == [receipt["submissionId"], "dlv_answer"]


def parking(turn: int, what: str, *deliveries: str) -> list[NewEvent]:
    """A turn that parks; `what` names the event with its requests."""
    begun, started, *_ = turn_events(turn, deliveries=deliveries)
    asked = step(turn, 0, what, EventType.INPUT_REQUESTED, requests=[{"requestId": "inp_1"}])
    end = of_turn(turn, "completed", EventType.TURN_COMPLETED).model_copy(update={"step": 0})
    return [begun, started, asked, end]


def settlements(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["submissionId"], each["outcome"]) for each in events if each["type"] == "submission_settled"]


async def test_a_prompt_is_not_settled_by_a_turn_that_asks_again(api: Api) -> None:
    receipt = await prompt(api)
    session_id = await session_of(api)
    await api.emit(session_id, *parking(0, "inputs", receipt["submissionId"]))
    await api.emit(session_id, *parking(1, "inputs/again/0/0", "dlv_1"))
    before = await read(api)
    await api.emit(session_id, *parking(2, "inputs/inp_2", "dlv_2"), *turn_events(3, deliveries=["dlv_3"]))

    after = await read(api)

    assert settlements(before) == []
    prompts = [receipt["submissionId"], "dlv_1", "dlv_2", "dlv_3"]
    assert settlements(after) == [(each, "completed") for each in prompts]


async def test_a_prompt_that_was_aborted_while_it_waited_is_settled_once(api: Api) -> None:
    receipt = await prompt(api)
    session_id = await session_of(api)
    await api.emit(session_id, *parking(0, "inputs", receipt["submissionId"]))
    await api.emit(session_id, of_turn(0, "cancelled", EventType.TURN_CANCELLED))
    await api.emit(session_id, *turn_events(1, deliveries=["dlv_next"]))

    events = await read(api)

    assert settlements(events) == [(receipt["submissionId"], "aborted"), ("dlv_next", "completed")]


async def test_the_end_of_a_turn_settles_the_deliveries_that_it_names(api: Api) -> None:
    await prompt(api)
    session_id = await session_of(api)
    end = of_turn(0, "completed", EventType.TURN_COMPLETED).model_copy(update={"delivery_ids": ("dlv_0", "dlv_1")})
    begun, *_ = turn_events(0, deliveries=["dlv_1"])
    await api.emit(session_id, begun, end)

    assert settlements(await read(api)) == [("dlv_0", "completed"), ("dlv_1", "completed")]


async def test_a_withdrawn_prompt_is_settled_as_aborted(api: Api) -> None:
    receipt = await prompt(api)
    withdrawn = await api.http.delete(f"/v1/deliveries/{receipt['submissionId']}")

    events, changes = await read(api), await read(api, view="updates")

    assert withdrawn.status_code == 200
    assert settlements(events) == [(receipt["submissionId"], "aborted")]
    [settled] = changes
    assert (settled["submissionId"], settled["outcome"]) == (receipt["submissionId"], "aborted")


async def test_a_refused_delivery_is_settled_as_failed(api: Api) -> None:
    await prompt(api)
    session_id = await session_of(api)
    refusal = NewEvent(
        type=EventType.DELIVERY_REFUSED,
        key=names.session_key("refused/dlv_1"),
        data={"deliveryId": "dlv_1", "code": "late", "message": "Too late."},
    )
    await api.emit(session_id, refusal)

    [event] = await read(api)

    assert (event["type"], event["submissionId"], event["outcome"]) == ("submission_settled", "dlv_1", "failed")


async def test_fifty_readers_in_each_form_read_the_same(api: Api) -> None:
    receipt = await prompt(api)
    await answered(api, receipt["submissionId"])
    whole = await read(api)

    async def polled() -> list[dict[str, Any]]:
        return await read(api, offset="-1", live="long-poll")

    async def streamed() -> bytes:
        async with api.http.stream("GET", f"{AGENT}/42", params={"offset": "-1", "live": "sse"}) as reading:
            return (await anext(reading.aiter_bytes())).split(b"\n\n")[0]

    caught_up = await asyncio.gather(*(read(api) for _ in range(50)))
    long_polled = await asyncio.gather(*(polled() for _ in range(50)))
    events = await asyncio.gather(*(streamed() for _ in range(50)))

    assert all(each == whole for each in (*caught_up, *long_polled))
    assert len(set(events)) == 1
