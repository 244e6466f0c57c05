"""Prompts that wait for their result, and what settles them."""

import asyncio
import json

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from tests.api.served import Api, of_turn, step, turn_events
from tests.api.test_agents_as_streams import AGENT, prompt, read, session_of, settlements
from tests.support.waiting import until


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
