"""Messages that are to enter a turn which waits: for people, or for the session of a subagent."""

import json

import pytest

from tests.runtime.told import all_turns, of_type, prompts, settled, show
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk, text

PAY = 'call pay {"amount": 3} then say paid'
HAND = f"call clerk {json.dumps({'message': 'drip 40 words delay 50'})} then say handed"


@pytest.fixture(scope="module", params=["child", "inline"])
def stack(module_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    return module_stack(
        provider=True, agents="tests.children.agents:boss", environment={"PERDURE_TURNS": request.param}
    )


async def asked(talk: Talk, message: str = PAY) -> tuple[str, str]:
    """A session whose turn waits for people: its delivery, and the request."""
    first = (await talk.create(message))["deliveryId"]
    (requests,) = of_type(await talk.until_boundary(), "input.requested")
    return first, requests["data"]["requests"][0]["requestId"]


async def answer(talk: Talk, request_id: str, option: str = "approve") -> None:
    await talk.send(inputResponses=[{"requestId": request_id, "optionId": option}])


async def ends(talk: Talk, *ids: str) -> list[tuple[str, str]]:
    found = [await settled(talk, each) for each in ids]
    return [(each["outcome"], each["turnId"]) for each in found]


def is_inline_and_killed(stack: str, killed: bool) -> bool:
    """A killed worker is replayed alike, however its turns run."""
    return stack == "inline" and killed


@pytest.mark.slow_where.with_args(is_inline_and_killed)
@pytest.mark.parametrize("option", ["approve", "deny"])
@pytest.mark.parametrize("killed", [False, True])
async def test_a_turn_that_waits_for_people_hears_it_with_their_answer(stack: Stack, option: str, killed: bool) -> None:
    async with stack.talk() as talk:
        first, request_id = await asked(talk)
        steering = [(await talk.send(f"say {word}", mode="steer"))["deliveryId"] for word in ("left", "right")]
        waiting = [(await show(talk, each))["status"] for each in steering]
        if killed:
            stack.workers[-1].kill()
            stack.start_worker()
        await answer(talk, request_id, option)
        events = await talk.until_boundary()
        found = await ends(talk, first, *steering)
        after = await talk.say("say after")

    assert waiting == ["queued", "queued"]
    # What people have approved runs all the same.
    (paid,) = of_type(events, "action.result")
    assert paid["data"]["status"] == ("completed" if option == "approve" else "rejected")
    (applied,) = of_type(events, "steer.applied")
    assert applied["data"]["deliveryIds"] == steering
    assert [each["data"]["message"] for each in of_type(events, "message.received")] == ["say left", "say right"]
    assert text(events) == "right"
    assert [outcome for outcome, _ in found] == ["completed"] * 3
    assert {turn for _, turn in found[1:]} == {"turn_1"}
    assert after == "after"


async def test_a_message_that_steers_one_of_two_answers_waits_for_the_other_one(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create('call pay {"amount": 3} and pay {"amount": 4} then say paid')
        (requests,) = of_type(await talk.until_boundary(), "input.requested")
        first, second = [each["requestId"] for each in requests["data"]["requests"]]
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await answer(talk, first)
        await talk.until_boundary()
        between = (await show(talk, steering))["status"]
        await answer(talk, second)
        events = await talk.until_boundary()
        end = await settled(talk, steering)

    assert between == "queued"
    assert (text(events), end["outcome"]) == ("steered", "completed")


async def test_one_that_waits_for_people_becomes_the_next_turn_if_its_turn_is_cancelled(stack: Stack) -> None:
    async with stack.talk() as talk:
        first, _ = await asked(talk)
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={"turnId": "turn_0"})
        found = await ends(talk, first, steering)
        events = await all_turns(talk, 2)

    assert found == [("cancelled", "turn_0"), ("completed", "turn_1")]
    assert prompts(events)[-1] == ["say steered"]
    assert of_type(events, "steer.applied") == []


async def test_an_agent_that_takes_other_messages_for_a_denial_hears_it(make_stack: StackFactory) -> None:
    hasty = make_stack(provider=True, agents="tests.conformance.agents:hasty")
    async with hasty.talk() as talk:
        first, _ = await asked(talk)
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        events = await talk.until_boundary()
        found = await ends(talk, first, steering)

    assert text(events) == "steered"
    assert [outcome for outcome, _ in found] == ["completed", "completed"]


@pytest.mark.slow_where.with_args(is_inline_and_killed)
@pytest.mark.parametrize("killed", [False, True])
async def test_a_turn_that_waits_for_a_child_hears_it_when_the_child_has_ended(stack: Stack, killed: bool) -> None:
    async with stack.talk() as talk:
        first = (await talk.create(HAND))["deliveryId"]
        await talk.until("subagent.called")
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        follow = (await talk.send("say followed"))["deliveryId"]
        waiting = (await show(talk, steering))["status"]
        if killed:
            stack.workers[-1].kill()
            stack.start_worker()
        events = await all_turns(talk, 2)
        found = await ends(talk, first, steering, follow)

    assert waiting == "queued"
    assert len(of_type(events, "subagent.completed")) == 1
    assert prompts(events) == [[HAND, "say steered"], ["say followed"]]
    assert len(of_type(events, "steer.applied")) == 1
    assert found == [("completed", "turn_0"), ("completed", "turn_0"), ("completed", "turn_1")]


async def test_one_that_waits_for_a_child_becomes_the_next_turn_if_its_turn_is_cancelled(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create(HAND))["deliveryId"]
        await talk.until("subagent.called")
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={"turnId": "turn_0"})
        found = await ends(talk, first, steering)
        events = await all_turns(talk, 2)

    assert found == [("cancelled", "turn_0"), ("completed", "turn_1")]
    assert prompts(events)[-1] == ["say steered"]


async def test_an_interrupt_stops_the_turn_that_waits_for_a_child_and_the_child(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create(HAND))["deliveryId"]
        (called,) = of_type(await talk.until("subagent.called"), "subagent.called")
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        found = [(await settled(talk, each))["outcome"] for each in (first, steering, urgent)]
        child = (await talk.http.get(f"/v1/sessions/{called['data']['childSessionId']}")).json()

    assert found == ["cancelled", "superseded", "completed"]
    assert child["status"] in ("completed", "failed")


async def test_it_reaches_the_turn_whose_child_asks_people(stack: Stack) -> None:
    async with stack.talk() as talk:
        order = json.dumps({"message": PAY.replace(" then ", "\\u0020then ")}).replace("\\\\u0020", "\\u0020")
        first, request_id = await asked(talk, f"call clerk {order} then say handed")
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await answer(talk, request_id)
        found = await ends(talk, first, steering)
        events = await talk.until_boundary()
        while "steered" not in text(events):
            events = await talk.until_boundary()

    assert [outcome for outcome, _ in found] == ["completed", "completed"]
