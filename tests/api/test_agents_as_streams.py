"""Prompts to named instances of agents, and their events as a Durable Stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol.events import EventType
from perdure.settings import Settings
from tests.api.served import Api, of_turn, serving, turn_events

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


def settlements(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["submissionId"], each["outcome"]) for each in events if each["type"] == "submission_settled"]


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


@pytest.mark.parametrize(
    ("code", "type", "meta"),
    [
        ("STEP_TIMEOUT", "submission_retry_exhausted", None),
        ("STEP_KILLS_WORKERS", "submission_retry_exhausted", None),
        ("TURN_DEADLINE_EXCEEDED", "submission_timeout", None),
        ("TURN_TERMINATED", "submission_interrupted", {"phase": "after_input_application"}),
        ("MODEL_CALL_FAILED", "MODEL_CALL_FAILED", None),
    ],
)
async def test_a_prompt_that_fails_has_the_name_of_flue_for_its_failure(
    api: Api, code: str, type: str, meta: dict[str, str] | None
) -> None:
    receipt = await prompt(api)
    session_id = await session_of(api)
    started = turn_events(0, deliveries=[receipt["submissionId"]])[0]
    failed = of_turn(0, "failed", EventType.TURN_FAILED)
    failed = failed.model_copy(update={"data": {**(failed.data or {}), "code": code, "message": "It failed."}})
    await api.emit(session_id, started, failed.model_copy(update={"delivery_ids": (receipt["submissionId"],)}))

    [settled] = [each for each in await read(api) if each["type"] == "submission_settled"]

    assert (settled["error"]["name"], settled["error"]["type"], settled["error"].get("meta")) == (code, type, meta)
