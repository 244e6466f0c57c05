"""`kill -9` of what serves a turn while the client reads it, and answers that are lost on the way."""

import asyncio
from collections.abc import Callable

import pytest

from perdure.client import AsyncClient, AsyncTurn, Draft, Event
from tests.support.plugin import StackFactory
from tests.support.proxy import Proxy
from tests.support.stack import Stack
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

WORDS = "".join(f"w{number} " for number in range(60))


@pytest.fixture
def stack(make_stack: StackFactory) -> Stack:
    """A stack of the test's own: parts of it die."""
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2"}
    return make_stack(provider=True, agents="tests.client.agents:agent", environment=environment)


async def read_with_a_death(turn: AsyncTurn, die: Callable[[], None]) -> list[Event]:
    """All events of the turn; something dies after the third piece of its text."""
    events: list[Event] = []
    async for event in turn:
        events.append(event)
        if [each.type for each in events].count("message.appended") == 3 and event.type == "message.appended":
            die()
    return events


def restart_api(stack: Stack) -> None:
    """Kill the API, and start another one in its place."""
    port = stack.url.rpartition(":")[2]
    stack.apis[0].kill()
    stack.start_api({"PERDURE_PORT": port}, wait=False)


async def test_a_killed_api_is_a_pause_in_the_stream(stack: Stack) -> None:
    outages: list[bool] = []
    async with AsyncClient(stack.url, on_outage=lambda error: outages.append(error is not None)) as client:
        turn = await client.session().send("drip 60 words delay 30")

        events = await read_with_a_death(turn, lambda: restart_api(stack))

        result = await turn.result()
    assert (result.status, result.message) == ("completed", WORDS)
    assert [event.index for event in events] == list(range(len(events)))
    assert outages == [True, False]


async def test_a_killed_worker_leaves_no_text_twice(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        turn = await client.session().send("drip 60 words delay 30")

        def die() -> None:
            stack.workers[0].kill()
            stack.start_worker(wait=False)

        events = await read_with_a_death(turn, die)
        result = await turn.result()

    types = [event.type for event in events]
    draft = Draft()
    for event in events[: types.index("message.completed")]:
        draft.add(event)
        assert WORDS.startswith(draft.text)
    assert "step.superseded" in types
    assert draft.text == WORDS == result.message
    assert draft.retracted == 1


async def test_a_message_is_sent_while_no_api_lives_and_is_accepted_once(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        session = client.session()
        await (await session.send("say one")).result()
        stack.apis[0].kill()

        sending = asyncio.create_task(session.send("say two"))
        stack.start_api({"PERDURE_PORT": stack.url.rpartition(":")[2]})
        result = await (await sending).result()

        assert (result.message, result.turn_id) == ("two", "turn_1")
        assert len([each async for each in client.deliveries(session.id or "")]) == 2


async def test_a_message_whose_receipt_was_lost_is_accepted_once(stack: Stack) -> None:
    host, _, port = stack.url.removeprefix("http://").partition(":")
    with Proxy(host, int(port)) as proxy:
        async with AsyncClient(stack.url) as direct, AsyncClient(f"http://{proxy.address}") as client:
            session = client.session()
            await (await session.send("say one")).result()

            # What is on its way to the caller when the connection breaks is lost; the API has accepted it.
            proxy.stall_answers()
            sending = asyncio.create_task(session.send("say two"))

            async def is_accepted() -> bool:
                return len([each async for each in direct.deliveries(session.id or "")]) == 2

            await until(is_accepted, "the message to be accepted")
            proxy.drop()
            result = await (await sending).result()

            assert (result.message, result.turn_id) == ("two", "turn_1")
            assert len([each async for each in direct.deliveries(session.id or "")]) == 2


async def test_an_answer_whose_receipt_was_lost_runs_the_tool_once(stack: Stack) -> None:
    host, _, port = stack.url.removeprefix("http://").partition(":")
    with Proxy(host, int(port)) as proxy:
        async with AsyncClient(stack.url) as direct, AsyncClient(f"http://{proxy.address}") as client:
            session = client.session()
            asked = await (await session.send('call pay {"amount": 5} then say paid')).result()
            (request,) = asked.input_requests

            proxy.stall_answers()
            answer = [{"requestId": request["requestId"], "optionId": "approve"}]
            sending = asyncio.create_task(session.send(input_responses=answer))

            async def is_answered() -> bool:
                return (await direct.input(request["requestId"]))["status"] != "open"

            await until(is_answered, "the answer to be accepted")
            proxy.drop()
            result = await (await sending).result()

            assert (result.status, result.message) == ("completed", "paid")
            page = await direct.events(session.id or "", types="action.result")
            assert len(page.events) == 1
