"""Every provider's API through the whole product; and what a session does when its provider refuses."""

import asyncio
from typing import Any

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types

AGENTS = ["chat", "responses", "anthropic"]


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runtime.served:providers")


def talking_to(stack: Stack, agent: str) -> Talk:
    return Talk(f"{stack.url}/agents/{agent}")


def emitted(events: list[Json], type: str) -> list[Any]:
    return [event["data"] for event in events if event["type"] == type]


async def asked(stack: Stack) -> list[Json]:
    """All requests that the provider has had."""
    async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as http:
        return (await http.get(f"{stack.provider_url}/requests")).json()["requests"]


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_conversation_with_thoughts_text_and_tools(stack: Stack, agent: str) -> None:
    async with talking_to(stack, agent) as talk:
        await talk.create(f"think Hm, {agent}; say Hello there")
        first = await talk.until_boundary()
        await talk.send('think Sums; call add {"a": 2, "b": 3} and add {"a": 4, "b": 5} then say five and nine')
        second = await talk.until_boundary()
        third = await talk.say("say remembered")

    assert emitted(first, "reasoning.completed")[0]["reasoning"] == f"Hm, {agent}"
    assert emitted(first, "reasoning.appended")[-1]["reasoningSoFar"] == f"Hm, {agent}"
    assert [data["messageSoFar"] for data in emitted(first, "message.appended")][-1] == "Hello there"
    assert text(first) == "Hello there"
    assert sorted(data["result"]["output"] for data in emitted(second, "action.result")) == [5, 9]
    assert text(second) == "five and nine"
    assert third == "remembered"
    for events in (first, second):
        assert types(events)[-2:] == ["turn.completed", "session.waiting"]
    requests = await asked(stack)
    assert requests[-1]["texts"][0].endswith("say Hello there")
    assert requests[-1]["said"] == "say remembered"


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("what", ["text", "id", "name", "nesting"])
async def test_a_reply_that_cannot_be_used_is_paid_once(stack: Stack, agent: str, what: str) -> None:
    async with talking_to(stack, agent) as talk:
        await talk.create("say before")
        await talk.until_boundary()
        before = len(await asked(stack))
        await talk.send(f"odd {what}")
        events = await talk.until_boundary()
        during = len(await asked(stack)) - before
        after = await talk.say("say after")

    # One more where calls have results to report.
    assert during == (1 if what == "text" else 2)
    assert types(events)[-2:] == ["turn.completed", "session.waiting"]
    assert after == "after"


@pytest.mark.parametrize("agent", AGENTS)
async def test_after_a_result_that_was_thought_about_the_session_continues(stack: Stack, agent: str) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    both = 'call final_output {"sum": 3} and add {"a": 1, "b": 2}'
    async with talking_to(stack, agent) as talk:
        await talk.create('think Easy; call final_output {"sum": 3}', outputSchema=schema)
        alone = await talk.until_boundary()
        await talk.send(f"think Easy; {both}", outputSchema=schema)
        beside = await talk.until_boundary()
        after = await talk.say("think On; say after")

    for events in (alone, beside):
        assert emitted(events, "result.completed")[0]["result"] == {"sum": 3}
    assert after == "after"


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_call_that_was_thought_about_and_approved_is_answered(stack: Stack, agent: str) -> None:
    async with talking_to(stack, agent) as talk:
        await talk.create('think Costly; call pay {"amount": 5} and add {"a": 1, "b": 2} then say done')
        parked = await talk.until_boundary()
        [request] = emitted(parked, "input.requested")[0]["requests"]
        await talk.send(inputResponses=[{"requestId": request["requestId"], "optionId": "approve"}])
        done = await talk.until_boundary()

    outcomes = [data["result"]["output"] for data in emitted([*parked, *done], "action.result")]
    assert sorted(outcomes, key=str) == [3, "paid 5"]
    assert text(done) == "done"


@pytest.mark.parametrize("agent", AGENTS)
async def test_after_a_turn_that_was_stopped_the_session_continues(stack: Stack, agent: str) -> None:
    async with talking_to(stack, agent) as talk:
        await talk.create('think Costly; call pay {"amount": 5} then say never')
        await talk.until_boundary()
        stopped = await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        assert stopped.is_success, stopped.text
        ended = await talk.until_boundary()
        after = await talk.say("say after")

    assert "turn.cancelled" in types(ended)
    assert after == "after"


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("status", [400, 401])
async def test_a_refusal_fails_the_turn_and_the_next_one_is_answered(stack: Stack, agent: str, status: int) -> None:
    async with talking_to(stack, agent) as talk:
        await talk.say("say before")
        await talk.send(f"fail {status} times 99; say never {agent}")
        failed = await talk.until_boundary()
        after = await talk.say("say after")

    assert types(failed)[-3:] == ["step.failed", "turn.failed", "session.waiting"]
    assert emitted(failed, "turn.failed")[0]["code"] == "MODEL_CALL_FAILED"
    assert f"answered {status}" in emitted(failed, "turn.failed")[0]["message"]
    assert after == "after"
    texts = (await asked(stack))[-1]["texts"]
    assert any(f"say never {agent}" in said for said in texts), "what was said in the failed turn is still known"


async def test_a_provider_that_is_down_is_asked_again_and_then_fails_the_turn(stack: Stack) -> None:
    async with talking_to(stack, "responses") as talk:
        await talk.create("fail 500 times 99; say never while down")
        failed = await talk.until_boundary()
        after = await talk.say("say after")

    assert types(failed)[-3:] == ["step.failed", "turn.failed", "session.waiting"]
    assert "answered 500" in emitted(failed, "turn.failed")[0]["message"]
    requests = await asked(stack)
    assert sum(request["said"].endswith("never while down") for request in requests) > 1
    assert after == "after"
    assert any("never while down" in said for said in requests[-1]["texts"])


async def test_a_provider_that_does_not_answer_is_asked_again_after_the_configured_time(
    make_stack: StackFactory,
) -> None:
    stack = make_stack(
        provider=True, agents="tests.runtime.served:providers", environment={"PERDURE_MODEL_SILENCE": "0.2"}
    )
    async with talking_to(stack, "chat") as talk, asyncio.timeout(PATIENCE):
        await talk.create("hang")

        while len(await asked(stack)) < 2:
            await asyncio.sleep(0.05)
