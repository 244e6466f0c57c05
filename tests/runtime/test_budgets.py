"""A budget through the whole product: people are asked, and the session continues on another worker."""

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    agents = "tests.runtime.bounded:thrifty"
    return module_stack(provider=True, agents=agents)


async def until_asked(talk: Talk) -> str:
    """Spend the budget; the id of the request to extend it."""
    assert await talk.say("say one") == "one"
    await talk.send("say two")
    events = await talk.until_boundary()
    (asked,) = [event for event in events if event["type"] == "input.requested"]
    (request,) = asked["data"]["requests"]
    assert request["action"]["toolName"] == "extend_budget"
    return request["requestId"]


async def test_an_answer_extends_the_budget_although_the_worker_was_killed_meanwhile(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await until_asked(talk)
        stack.workers[-1].kill()
        stack.start_worker(wait=False)
        answered = await talk.http.post(f"/v1/inputs/{request_id}", json={"optionId": "extend"})
        assert answered.is_success, answered.text
        events = await talk.until_boundary()

    assert text(events) == "two"
    assert types(events)[-1] == "session.waiting"


async def test_a_plain_message_may_be_the_answer(stack: Stack) -> None:
    async with stack.talk() as talk:
        await until_asked(talk)
        await talk.send("stop")
        events = await talk.until_boundary()

    (failed,) = [event["data"] for event in events if event["type"] == "turn.failed"]
    assert failed["code"] == "SESSION_BUDGET_REACHED"
    assert failed["details"]["limit"] == 25
