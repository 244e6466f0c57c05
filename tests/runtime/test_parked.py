"""Parked and cancelled turns, with every part real: what is asked, answered, stopped, and signalled again."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.dev.supervisor import command
from perdure.protocol.deliveries import DeliveryBody
from perdure.protocol.inputs import InputAnswer
from perdure.session.inputs import resolved
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.inputs import Answering, InputRow, Vote
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types

ASK = 'call pay {"amount": 3} then say settled'


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    agents = "tests.conformance.agents:concierge,tests.conformance.agents:hasty"
    return module_stack(provider=True, agents=agents)


@pytest.fixture
async def store(stack: Stack) -> AsyncGenerator[Store]:
    store = await stack.store()
    yield store
    await store.close()


async def parked(talk: Talk) -> str:
    """Ask for an approval; its request."""
    await talk.create(ASK)
    events = await talk.until_boundary()
    (asked,) = [event for event in events if event["type"] == "input.requested"]
    (request,) = asked["data"]["requests"]
    return request["requestId"]


async def cancel(talk: Talk, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json=body or {})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_answer_to_the_request_itself_resumes_the_turn(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)
        shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()
        listed = (await talk.http.get("/v1/inputs", params={"sessionId": talk.session_id})).json()

        answer = await talk.http.post(f"/v1/inputs/{request_id}", json={"optionId": "approve"})
        events = await talk.until_boundary()

    assert answer.json() == {
        "requestId": request_id,
        "status": "answered",
        "optionId": "approve",
        "sessionId": talk.session_id,
    }
    assert [each["requestId"] for each in listed["inputs"]] == shown["openInputs"] == [request_id]
    assert shown["waitingFor"].startswith(f"Approval of `pay` ({request_id}) by the requester, since ")
    assert text(events) == "settled"


async def test_changed_arguments_are_what_is_run(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)

        await talk.send(inputResponses=[{"requestId": request_id, "optionId": "approve", "arguments": {"amount": 2}}])
        events = await talk.until_boundary()

    (result,) = [event["data"]["result"] for event in events if event["type"] == "action.result"]
    assert result["output"] == {"paid": 2}


async def test_an_answer_that_comes_twice_runs_the_call_once(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)
        approval = {"requestId": request_id, "optionId": "approve"}

        await asyncio.gather(*(talk.send(inputResponses=[approval]) for _ in range(10)))
        await talk.until_boundary()
        await talk.say("say the next turn")

        turns = [event async for event in _all(talk) if event["type"] == "action.result"]
    assert len(turns) == 1


async def test_a_late_answer_runs_nothing_and_ends_in_a_boundary(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)
        await talk.send(inputResponses=[{"requestId": request_id, "optionId": "deny"}])
        await talk.until_boundary()

        await talk.send(inputResponses=[{"requestId": request_id, "optionId": "approve"}])
        events = await talk.until_boundary()

    assert "action.result" not in types(events)
    assert types(events)[-1] == "session.waiting"


async def test_an_answer_to_nothing_ends_in_a_boundary(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say hello")

        answer = await talk.send(inputResponses=[{"requestId": "inp_nothing", "optionId": "approve"}])
        events = await talk.until_boundary()

    assert answer["inputs"] == [{"requestId": "inp_nothing", "status": "unknown"}]
    assert "action.result" not in types(events)


async def test_a_message_waits_behind_an_approval(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)

        await talk.send("say later")
        await talk.send(inputResponses=[{"requestId": request_id, "optionId": "approve"}])
        first, second = await talk.until_boundary(), await talk.until_boundary()

    assert (text(first), text(second)) == ("settled", "later")


async def test_a_hasty_agent_continues_with_the_message(stack: Stack) -> None:
    async with Talk(f"{stack.url}/agents/hasty") as talk:
        await talk.create('call pay {"amount": 3} and ask_question {"prompt": "Sure?"} then say never')
        await talk.until_boundary()

        await talk.send("say something else")
        events = await talk.until_boundary()

    (denied,) = [event["data"] for event in events if event["type"] == "action.result"]
    assert denied["status"] == "rejected"
    assert denied["error"]["message"] == "Ignored because the user continued without responding."
    assert text(events) == "something else"


async def test_a_running_turn_is_stopped(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("drip 2000 words delay 20")
        async for event in talk.events():
            if event["type"] == "message.appended":
                break

        answers = [await cancel(talk, {"turnId": "turn_0"}) for _ in range(2)]
        events = await talk.until_boundary()

        assert {answer["status"] for answer in answers} <= {"accepted", "no_active_turn"}
        assert answers[0] == {"ok": True, "sessionId": talk.session_id, "status": "accepted"}
        assert types(events).count("cancel.requested") == 1
        assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
        assert (await cancel(talk))["status"] == "no_active_turn"
        assert await talk.say("say going on") == "going on"


async def test_a_parked_turn_is_stopped_and_its_request_withdrawn(stack: Stack) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)

        assert (await cancel(talk))["status"] == "accepted"
        events = await talk.until_boundary()
        late = await talk.http.post(f"/v1/inputs/{request_id}", json={"optionId": "approve"})

        assert types(events)[0] == "cancel.requested"
        assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
        assert (late.status_code, late.json()["code"], late.json()["status"]) == (409, "input_closed", "withdrawn")
        assert await talk.say("say going on") == "going on"


async def test_the_command_line_stops_a_turn(stack: Stack) -> None:
    async with stack.talk() as talk:
        await parked(talk)

        first = _stop(stack, talk.session_id)
        events = await talk.until_boundary()
        second = _stop(stack, talk.session_id)

    assert first.startswith("Its turn will be stopped")
    assert second.startswith("There is nothing to stop")
    assert "turn.cancelled" in types(events)


async def test_an_answer_whose_api_died_before_the_signal_is_consumed(stack: Stack, store: Store) -> None:
    async with stack.talk() as talk:
        request_id = await parked(talk)
        body = DeliveryBody(kind="answer", answers=(request_id,)).model_dump(mode="json")
        delivery = NewDelivery(talk.session_id, "dlv_stranded", body, owner="unknown")
        vote = Vote(request_id, InputAnswer(option_id="approve", digest=(await _digest(store, request_id))))

        await store.answer(Answering(talk.session_id, [vote], delivery), _resolved_event)

        assert text(await talk.until_boundary()) == "settled"


async def _digest(store: Store, request_id: str) -> str:
    row = await store.input(request_id)
    assert row is not None
    return row.request.digest


def _resolved_event(row: InputRow) -> Any:
    return resolved(row.request, row.status, row.answer)


async def _all(talk: Talk) -> AsyncGenerator[dict[str, Any]]:
    """What the session has said so far."""
    count = talk.cursor
    async for event in talk.events():
        yield event
        count -= 1
        if count == 0:
            return


def _stop(stack: Stack, session_id: str) -> str:
    done = subprocess.run(
        command("sessions", "cancel", session_id),
        env=stack.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout
