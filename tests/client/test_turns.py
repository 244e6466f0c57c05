"""Sessions and turns, against the real product."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.client import AsyncClient, AsyncSession, ClientError
from tests.support.stack import Stack


@pytest.fixture
async def client(stack: Stack) -> AsyncGenerator[AsyncClient]:
    async with AsyncClient(stack.url) as client:
        yield client


async def asked(session: AsyncSession, message: str) -> Any:
    """The one request with which the turn ends."""
    result = await (await session.send(message)).result()
    assert result.status == "waiting"
    (request,) = result.input_requests
    return request


async def test_a_session_is_talked_with(client: AsyncClient) -> None:
    session = client.session()

    first = await (await session.send("say one")).result()
    second = await (await session.send('call add {"a": 1, "b": 2} then say two')).result()

    assert (first.status, first.message, first.turn_id) == ("completed", "one", "turn_0")
    assert (second.status, second.message, second.turn_id) == ("completed", "two", "turn_1")
    assert first.session_id == second.session_id == session.id
    assert second.usage["input_tokens"] > 0
    assert second.boundary == "session.waiting"


async def test_the_events_of_a_turn_come_one_by_one_and_move_the_cursor_to_behind_the_last(client: AsyncClient) -> None:
    session = client.session()
    turn = await session.send("drip 5 words")

    indexes: list[int | None] = []
    async for event in turn:
        indexes.append(event.index)
        assert session.state["streamIndex"] == (event.index or 0) + 1

    assert indexes == list(range(len(indexes)))
    assert (await turn.result()).message == "w0 w1 w2 w3 w4 "


async def test_another_client_continues_with_the_state(client: AsyncClient, stack: Stack) -> None:
    session = client.session()
    await (await session.send("say one")).result()

    async with AsyncClient(stack.url) as other:
        result = await (await other.session(session.state).send("say two")).result()

    assert (result.message, result.turn_id, result.session_id) == ("two", "turn_1", session.id)


async def test_the_owner_continues_a_session_by_its_id_alone(client: AsyncClient) -> None:
    begun = client.session()
    await (await begun.send("say one")).result()
    tail = (await client.events(begun.id or "")).tail or 0
    session = client.session({"sessionId": begun.id, "streamIndex": tail + 1})

    said = await (await session.send("say two")).result()
    request = await asked(session, 'call pay {"amount": 5} then say paid')
    answer = {"requestId": request["requestId"], "optionId": "approve", "arguments": {"amount": 3, "to": "bob"}}
    paid = await (await session.send(input_responses=[answer])).result()

    assert (said.message, said.turn_id) == ("two", "turn_1")
    assert (paid.status, paid.message) == ("completed", "paid")


async def test_an_approval_is_answered(client: AsyncClient) -> None:
    session = client.session()
    request = await asked(session, 'call pay {"amount": 5} then say paid')

    turn = await session.send(input_responses=[{"requestId": request["requestId"], "optionId": "approve"}])
    result = await turn.result()

    assert request["action"]["input"] == {"amount": 5, "to": "ada"}
    assert request["details"]["kind"] == "approval"
    assert [each["status"] for each in turn.inputs] == ["answered"]
    assert (result.status, result.message, result.input_requests) == ("completed", "paid", [])


async def test_two_requests_are_answered_one_after_the_other(client: AsyncClient) -> None:
    session = client.session()
    result = await (await session.send('call pay {"amount": 1} and pay {"amount": 2} then say both')).result()
    first, second = (each["requestId"] for each in result.input_requests)

    half = await (await session.send(input_responses=[{"requestId": first, "optionId": "approve"}])).result()
    whole = await (await session.send(input_responses=[{"requestId": second, "optionId": "deny"}])).result()

    assert [each["requestId"] for each in half.input_requests] == [second]
    assert half.status == "waiting"
    assert (whole.status, whole.message) == ("completed", "both")


async def test_what_a_subagent_asks_is_answered_in_the_stream_of_its_parent(client: AsyncClient) -> None:
    session = client.session()
    script = 'call clerk {"message": "call pay {\\"amount\\": 3}"} then say settled'
    request = await asked(session, script)

    result = await (
        await session.send(input_responses=[{"requestId": request["requestId"], "optionId": "approve"}])
    ).result()

    assert (result.status, result.message) == ("completed", "settled")


async def test_a_repeated_answer_gets_the_turn_that_has_read_it(client: AsyncClient) -> None:
    session = client.session()
    request = await asked(session, 'call pay {"amount": 5} then say paid')
    answer = [{"requestId": request["requestId"], "optionId": "approve"}]
    first = await (await session.send(input_responses=answer)).result()

    again = await asyncio.wait_for((await session.send(input_responses=answer)).result(), 30)

    assert again.message == first.message == "paid"


async def test_the_same_key_gets_the_same_turn(client: AsyncClient) -> None:
    session = client.session()
    await (await session.send("say one")).result()
    first = await (await session.send("say two", key="mine")).result()
    await (await session.send("say three")).result()

    again = await asyncio.wait_for((await session.send("say two", key="mine")).result(), 30)

    assert (again.turn_id, again.message) == (first.turn_id, "two")


async def test_a_turn_that_was_left_in_the_middle_is_not_taken_for_the_next_one(client: AsyncClient) -> None:
    session = client.session()
    left = await session.send("drip 40 words delay 20")
    async for event in left:
        if event.type == "message.appended":
            break
    await left.aclose()

    result = await (await session.send("say next")).result()

    assert (result.message, result.turn_id) == ("next", "turn_1")
    with pytest.raises(ClientError, match="closed before its end"):
        await left.result()


async def test_a_reader_that_was_interrupted_reads_on(client: AsyncClient) -> None:
    turn = await client.session().send('call wait {"seconds": 1} then drip 5 words')
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn.result(), 0.4)

    assert (await turn.result()).message == "w0 w1 w2 w3 w4 "


async def test_a_cancelled_turn_says_so(client: AsyncClient) -> None:
    session = client.session()
    turn = await session.send("drip 500 words delay 20")
    async for event in turn:
        if event.type == "message.appended":
            assert await turn.cancel() == "accepted"
            break

    result = await turn.result()

    assert result.status == "cancelled"
    assert (await (await session.send("say next")).result()).message == "next"


async def test_a_failed_turn_says_so_and_the_session_goes_on(client: AsyncClient) -> None:
    session = client.session()

    result = await (await session.send("fail 400")).result()

    assert result.status == "failed"
    assert (result.error or {})["code"] == "MODEL_CALL_FAILED"
    assert (await (await session.send("say next")).result()).message == "next"


async def test_after_its_end_the_next_message_starts_another_session(client: AsyncClient) -> None:
    session = client.session()

    result = await (await session.send("say done", mode="task")).result()

    assert (result.status, result.boundary, result.message) == ("completed", "session.completed", "done")
    assert session.state == {"streamIndex": 0}
    ended = session.id
    assert (await (await session.send("say anew")).result()).session_id != ended


async def test_an_interrupt_gets_its_own_turn_and_not_the_end_of_the_one_that_it_stops(client: AsyncClient) -> None:
    session = client.session()
    stopped = await session.send("drip 500 words delay 20")
    async for event in stopped:
        if event.type == "message.appended":
            break

    result = await (await session.send("say instead", mode="interrupt")).result()

    assert (result.status, result.message) == ("completed", "instead")


async def test_a_message_that_steers_ends_with_the_turn_that_it_has_entered(client: AsyncClient) -> None:
    session = client.session()
    steered = await session.send('call wait {"seconds": 1} then say first')
    async for event in steered:
        if event.type == "actions.requested":
            break

    steer = await session.send("say steered", mode="steer")
    results = [await turn.result() for turn in (steered, steer)]

    assert [each.turn_id for each in results] == ["turn_0", "turn_0"]
    assert results[0].message == results[1].message


async def test_the_end_of_a_turn_that_somebody_else_has_cancelled_is_not_taken_for_the_next_one(
    client: AsyncClient,
) -> None:
    session = client.session()
    await asked(session, 'call pay {"amount": 5} then say paid')
    await client.cancel(session.id or "")

    result = await (await session.send("say next")).result()

    assert (result.status, result.message) == ("completed", "next")


async def test_a_task_that_is_cancelled_says_so(client: AsyncClient) -> None:
    turn = await client.session().send('call wait {"seconds": 30}', mode="task")
    async for event in turn:
        if event.type == "actions.requested":
            break
    await turn.cancel()

    result = await turn.result()

    assert (result.status, result.boundary) == ("cancelled", "session.failed")


async def test_a_turn_whose_session_is_deleted_ends(client: AsyncClient) -> None:
    session = client.session()
    turn = await session.send('call wait {"seconds": 30}')
    async for event in turn:
        if event.type == "actions.requested":
            break
    await client.request("DELETE", f"/v1/sessions/{session.id}")

    result = await asyncio.wait_for(turn.result(), 30)

    # The turn is stopped first; whether it or the session comes to its end before is a matter of milliseconds.
    assert result.status in ("cancelled", "failed")
    with pytest.raises(ClientError) as gone:
        await client.show(turn.session_id)
    assert gone.value.status == 404


async def test_what_a_session_waits_for_is_told(client: AsyncClient) -> None:
    session = client.session()
    request = await asked(session, 'call pay {"amount": 5} then say paid')

    why = await client.why(session.id or "")

    assert (why["code"], why["details"]["inputs"]) == ("input", [request["requestId"]])


async def test_a_message_that_is_withdrawn_is_refused(client: AsyncClient) -> None:
    session = client.session()
    request = await asked(session, 'call pay {"amount": 5} then say paid')
    waiting = await session.send("say later")

    await client.withdraw(waiting.delivery_id or "")
    result = await asyncio.wait_for(waiting.result(), 30)

    assert (result.status, (result.error or {})["code"]) == ("refused", "withdrawn")
    assert request["details"]["kind"] == "approval"


async def test_a_lane_is_read_on_its_own_stream(client: AsyncClient) -> None:
    session = client.session()
    await (await session.send("say one")).result()

    first = await (await session.send("say work", lane="cron")).result()
    second = await (await session.send("say more work", lane="cron")).result()
    main = await (await session.send("say two")).result()

    assert (first.message, second.message, main.message) == ("work", "more work", "two")
    assert first.session_id == second.session_id != session.id == main.session_id


async def test_a_structured_result_is_there_as_data(client: AsyncClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    result = await (
        await client.session().send('call final_output {"n": 3}', output_schema=schema, client_context="a test")
    ).result()

    assert (result.status, result.data) == ("completed", {"n": 3})


async def test_the_live_events_of_a_session_end_with_it(client: AsyncClient) -> None:
    session = client.session()
    await (await session.send("say one")).result()
    seen: list[str] = []

    async def follow() -> None:
        seen.extend([event.type async for event in client.session(session.state).events(0)])

    following = asyncio.create_task(follow())
    await client.request("POST", f"/eve/v1/session/{session.id}/reset", body={})
    await asyncio.wait_for(following, 30)

    assert seen[0] == "session.started"
    assert seen[-1] == "session.completed"


async def test_the_end_of_a_session_that_was_read_is_the_end_of_its_events(client: AsyncClient) -> None:
    session = client.session()
    await (await session.send("say done", mode="task")).result()
    tail = (await client.events(session.id or "")).tail or 0

    later = [each async for each in client.session({"sessionId": session.id}).events(tail + 1)]

    assert later == []


async def test_what_an_api_shows_is_listed(client: AsyncClient) -> None:
    session = client.session(agent="concierge")
    await (await session.send("say one", tags={"job": "listed"})).result()
    await (await session.send('call pay {"amount": 5}')).result()
    other = client.session()
    await (await other.send("say two", tags={"job": "listed"})).result()

    assert (await client.health())["status"] == "ready"
    assert (await client.info("concierge"))["agent"]["name"] == "concierge"
    listed = [each["sessionId"] async for each in client.sessions(tag="job:listed")]
    assert listed == [other.id, session.id]
    assert [each["sessionId"] async for each in client.sessions(limit=1, tag="job:listed")] == [other.id]
    assert (await client.show(session.id or ""))["status"] == "waiting"
    deliveries = [each async for each in client.deliveries(session.id or "")]
    assert [each["status"] for each in deliveries] == ["running", "settled"]
    assert (await client.delivery(deliveries[1]["deliveryId"], wait=1))["outcome"] == "completed"
    (request,) = [each async for each in client.inputs(sessionId=session.id)]
    assert (await client.input(request["requestId"]))["tool"] == "pay"
    assert (await client.answer(request["requestId"], "deny", reason="no"))["optionId"] == "deny"
    assert [each async for each in client.runs()] == []
    page = await client.events(session.id or "", limit=2)
    assert ([each.index for each in page.events], page.has_more) == ([0, 1], True)
    assert (page.tail or 0) > 2


async def test_what_is_not_there_or_not_allowed_raises_at_once_with_the_words_of_the_api(client: AsyncClient) -> None:
    session = client.session()
    await (await session.send("say one")).result()
    with pytest.raises(ClientError) as unknown:
        await client.show("ses_nowhere")
    with pytest.raises(ClientError) as turn:
        await client.session({**session.state, "continuationToken": "eve:x"}).send("hello")
    with pytest.raises(ClientError) as stream:
        async for _ in client.session({"sessionId": "../ses"}).events():
            pass

    assert unknown.value.status == 404
    assert (turn.value.status, turn.value.code) == (409, "session_not_active")
    assert stream.value.status == 404


async def test_nothing_to_send_is_no_request(client: AsyncClient) -> None:
    with pytest.raises(ClientError, match="message, input responses, or both"):
        await client.session().send()
    with pytest.raises(ClientError, match="begins with a message"):
        await client.session().send(input_responses=[{"requestId": "inp_1"}])
    with pytest.raises(ClientError, match="state of a session"):
        client.session({"sessionId": "ses_1", "streamIndex": "many"})
