"""Programs of the model in sessions of real processes."""

import json
from collections.abc import AsyncGenerator

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


@pytest.fixture(scope="module", params=["child", "inline"])
def stack(module_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    return module_stack(
        provider=True, agents="tests.code_mode.agents:agents", environment={"PERDURE_TURNS": request.param}
    )


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk


def program(*lines: str) -> str:
    return "call code_mode " + json.dumps({"code": "\n".join(lines)})


def of_type(events: list[Json], type: str) -> list[Json]:
    return [each["data"] for each in events if each["type"] == type]


def requests_in(events: list[Json]) -> list[Json]:
    return [request for each in of_type(events, "input.requested") for request in each["requests"]]


def approve(*requests: Json) -> list[Json]:
    return [{"requestId": each["requestId"], "optionId": "approve"} for each in requests]


async def asked(talk: Talk, message: str) -> tuple[list[Json], list[Json]]:
    await talk.create(message)
    events = await talk.until_boundary()
    return events, requests_in(events)


async def test_the_value_of_a_program_comes_back_to_the_model(talk: Talk) -> None:
    await talk.create(program("import asyncio", "sums = await asyncio.gather(add(1, 2), add(a=3))", "sum(sums)"))
    events = await talk.until_boundary()

    assert text(events) == "Results: 7"
    (actions,) = of_type(events, "actions.requested")
    ids = [each["callId"] for each in actions["actions"]]
    assert [each.rpartition(":")[2] for each in ids] == ["tool-1", "tool-2"]
    assert sorted(each["result"]["callId"] for each in of_type(events, "action.result")) == ids


async def test_an_approval_in_the_middle_of_a_program(talk: Talk) -> None:
    lines = ("x = await add(1, 2)", "y = await pay(amount=x)", "z = await add(10)", "[y, z]")
    events, (request,) = await asked(talk, program(*lines))
    await talk.send(inputResponses=approve(request))
    more = await talk.until_boundary()

    assert (request["action"]["toolName"], request["action"]["input"]) == ("pay", {"amount": 3})
    assert types(events)[-4:] == ["step.completed", "input.requested", "turn.completed", "session.waiting"]
    assert text(more) == 'Results: ["paid 3",11]'
    # The approved call was never requested as an action, and the later one belongs to the new turn.
    assert [(each["turnId"], each["actions"][0]["toolName"]) for each in of_type(more, "actions.requested")] == [
        ("turn_1", "add")
    ]


async def test_a_program_asks_again_and_again(talk: Talk) -> None:
    _, (first,) = await asked(talk, program("[await pay(1), await pay(2)]"))
    await talk.send(inputResponses=approve(first))
    (second,) = requests_in(await talk.until_boundary())
    await talk.send(inputResponses=approve(second))

    assert text(await talk.until_boundary()) == 'Results: ["paid 1","paid 2"]'


async def test_a_program_asks_for_several_calls_at_once(talk: Talk) -> None:
    _, requests = await asked(talk, program("import asyncio", "await asyncio.gather(pay(1), add(1), pay(2))"))
    assert len(requests) == 2
    await talk.send(inputResponses=approve(*requests))

    assert text(await talk.until_boundary()) == 'Results: ["paid 1",2,"paid 2"]'


async def test_a_program_can_catch_that_people_deny(talk: Talk) -> None:
    lines = ("try:", "  x = await pay(1)", "except PermissionError as error:", "  x = str(error)", "x")
    _, (request,) = await asked(talk, program(*lines))
    await talk.send(inputResponses=[{"requestId": request["requestId"], "optionId": "deny"}])

    assert text(await talk.until_boundary()) == "Results: Tool execution was denied."


async def test_a_message_instead_of_an_answer_waits_for_the_program(talk: Talk) -> None:
    _, (request,) = await asked(talk, program("await pay(1)"))
    await talk.send("say Next")
    await talk.send(inputResponses=approve(request))

    assert text(await talk.until_boundary()) == "Results: paid 1"
    assert text(await talk.until_boundary()) == "Next"


async def test_to_cancel_a_program_that_waits_for_people(talk: Talk) -> None:
    _, (request,) = await asked(talk, program("await add(1)", "await pay(1)"))

    assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).json()["status"] == "accepted"
    events = await talk.until_boundary()

    assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
    assert (await talk.http.get(f"/v1/inputs/{request['requestId']}")).json()["status"] == "withdrawn"
    assert [each["result"]["toolName"] for each in of_type(events, "action.result")] == ["pay"]
    assert await talk.say("say Still here") == "Still here"


async def test_a_subagent_in_a_program(talk: Talk) -> None:
    lines = ("x = await add(1, 2)", 'y = await clerk(message=f"say {x} Found")', "[y, await add(5)]")
    await talk.create(program(*lines))
    events = await talk.until_boundary()

    assert text(events) == 'Results: ["3 Found",6]'
    assert [each for each in types(events) if not each.startswith("message")] == [
        "session.started",
        "turn.started",
        "step.started",
        *["actions.requested", "action.result"],
        *["actions.requested", "step.completed", "subagent.called", "subagent.completed", "action.result"],
        *["actions.requested", "action.result"],
        *["step.started", "step.completed", "turn.completed", "session.waiting"],
    ]
    (called,) = of_type(events, "subagent.called")
    assert (called["turnId"], called["callId"].rpartition(":")[2]) == ("turn_0", "tool-2")


async def test_subagents_and_approvals_at_once(talk: Talk) -> None:
    lines = ("import asyncio", 'await asyncio.gather(clerk(message="say Hi"), pay(1), add(1))')
    _, (request,) = await asked(talk, program(*lines))
    await talk.send(inputResponses=approve(request))

    assert text(await talk.until_boundary()) == 'Results: ["Hi","paid 1",2]'


async def test_a_subagent_of_a_program_asks_people(talk: Talk) -> None:
    order = json.dumps('call pay {"amount": 5}')
    _, (request,) = await asked(talk, program(f"x = await clerk(message={order})", "y = await pay(2)", "[x, y]"))
    await talk.send(inputResponses=approve(request))
    (second,) = requests_in(await talk.until_boundary())
    await talk.send(inputResponses=approve(second))

    assert text(await talk.until_boundary()) == 'Results: ["Results: paid 5","paid 2"]'


async def test_to_cancel_a_program_that_waits_for_a_subagent(talk: Talk) -> None:
    await talk.create(program('await clerk(message="drip 200 words delay 100")'))
    await talk.until("subagent.called")

    assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).json()["status"] == "accepted"

    assert types(await talk.until_boundary())[-2:] == ["turn.cancelled", "session.waiting"]
    assert await talk.say("say Still here") == "Still here"


async def test_two_programs_of_one_reply(talk: Talk) -> None:
    code = json.dumps({"code": "await add(1)"})
    await talk.create(f"call code_mode {code} and code_mode {code}")

    assert text(await talk.until_boundary()).count("2") == 2


async def test_the_programs_of_a_task_ask_nobody(talk: Talk) -> None:
    await talk.create(program("await pay(1)"), mode="task")
    events = [event async for event in talk.events()]

    assert types(events)[-1] == "session.completed"
    assert "nobody can be asked" in text(events)
