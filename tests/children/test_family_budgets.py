"""What families use, and budgets that end in the middle, with real processes."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import pytest

from tests.support.script import plan
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types

from .agents import thrifty
from .test_subagents import hand, of_type, stream_of

#: What one reply with one call uses: ten tokens of input and five of output.
REPLY = 15
CHILDREN = 10
#: Seven replies, each of the first six with another call.
TASK = " then ".join([*(f'call add {{"a": {n}, "b": 1}}' for n in range(6)), "say All done for you"])


@pytest.fixture
async def poor(stack: Stack) -> AsyncGenerator[Talk]:
    """A caller of the agent with a budget."""
    async with Talk(f"{stack.url}/agents/thrifty") as poor:
        yield poor


@pytest.fixture
async def provider(stack: Stack) -> AsyncGenerator[httpx2.AsyncClient]:
    """The provider, which has answered nothing yet."""
    async with httpx2.AsyncClient(base_url=stack.provider_url, verify=False) as http:
        await http.post("/reset")
        yield http


async def charged(provider: httpx2.AsyncClient) -> Json:
    """The tokens of all answers that the provider has given."""
    asked = (await provider.get("/requests")).json()["requests"]
    answers = [plan(each["said"], each["round"], each["results"]) for each in asked]
    return {
        "inputTokens": sum(answer.prompt_tokens for answer in answers),
        "outputTokens": sum(len(answer.words) + 5 * len(answer.calls) for answer in answers),
    }


async def look(talk: Talk, session_id: str) -> Json:
    return (await talk.http.get(f"/v1/sessions/{session_id}")).json()


def tokens(*usages: Json) -> int:
    return sum(each["inputTokens"] + each["outputTokens"] for each in usages)


def plus(*usages: Json) -> Json:
    return {name: sum(each[name] for each in usages) for name in ("inputTokens", "outputTokens")}


async def members(talk: Talk, events: list[Json]) -> list[Json]:
    """All descendants of the session with these events."""
    found: list[Json] = []
    for called in of_type(events, "subagent.called"):
        found.append(await look(talk, called["childSessionId"]))
        found += await members(talk, await stream_of(talk, called["childSessionId"]))
    return found


async def test_parallel_children_overspend_a_budget_by_at_most_what_was_in_flight(
    talk: Talk, poor: Talk, provider: httpx2.AsyncClient
) -> None:
    await poor.create(hand(*[("hand", TASK)] * CHILDREN) + " then say Done")
    events = await poor.until_boundary()

    root = await look(talk, poor.session_id)
    spent = tokens(root["usage"], root["descendants"]["usage"])
    limit = thrifty.limits.session_tokens
    assert limit is not None
    assert limit < spent + 3 * REPLY
    assert spent <= limit + CHILDREN * REPLY
    assert plus(root["usage"], root["descendants"]["usage"]) == await charged(provider)
    results = of_type(events, "action.result")
    refused = [each["error"]["message"] for each in results if each["status"] == "failed"]
    assert len(results) == CHILDREN
    assert refused
    assert all("(PARENT_BUDGET_REACHED)" in each for each in refused)
    # The parent's own next call asks.
    (asked,) = of_type(events, "input.requested")
    assert asked["requests"][0]["action"]["toolName"] == "extend_budget"
    assert types(events)[-1] == "session.waiting"


async def test_an_extension_lets_the_parent_go_on(poor: Talk) -> None:
    endless = " then ".join(f'call add {{"a": {n}, "b": 1}}' for n in range(40))
    await poor.create(hand(("hand", endless)) + " then say Done")
    events = await poor.until_boundary()
    (result,), (asked,) = of_type(events, "action.result"), of_type(events, "input.requested")
    assert "(PARENT_BUDGET_REACHED)" in result["error"]["message"]

    await poor.send(inputResponses=[{"requestId": asked["requests"][0]["requestId"], "optionId": "extend"}])

    assert text(await poor.until_boundary()) == "Done"


async def test_what_a_family_of_any_depth_uses_is_what_the_provider_has_counted(
    talk: Talk, provider: httpx2.AsyncClient
) -> None:
    deep = ("researcher", hand(("clerk", TASK), ("clerk", "say Quick")) + " then say Found it")
    await talk.create(hand(deep, ("clerk", "fail 500 times 2; say Late"), ("agent", "say Copy")) + " then say Done")
    events = await talk.until_boundary()

    assert text(events) == "Done"
    root, below = await look(talk, talk.session_id), await members(talk, events)
    assert len(below) == 5
    assert plus(root["descendants"]["usage"]) == plus(*(each["usage"] for each in below))
    (researcher,) = [each for each in below if each["agent"] == "researcher"]
    under = [each for each in below if each["parent"]["sessionId"] == researcher["sessionId"]]
    assert plus(researcher["descendants"]["usage"]) == plus(*(each["usage"] for each in under))
    failed = {"inputTokens": 2 * 10, "outputTokens": 2 * 1}
    # Two requests were refused, and a refusal costs nothing.
    assert plus(root["usage"], root["descendants"]["usage"], failed) == await charged(provider)


async def test_a_session_without_children_shows_none(talk: Talk) -> None:
    await talk.say("say Hello")

    assert "descendants" not in await look(talk, talk.session_id)


@pytest.mark.chaos
@pytest.mark.parametrize("turns", ["child", pytest.param("inline", marks=pytest.mark.slow)])
async def test_a_worker_that_is_killed_in_the_middle_makes_nothing_count_twice(tmp_path: Path, turns: str) -> None:
    agents = "tests.children.agents:agents"
    with Stack(tmp_path, provider=True, agents=agents, environment={"PERDURE_TURNS": turns}) as stack:
        async with stack.talk() as talk:
            slow = 'call add {"a": 1, "b": 2} then drip 20 words delay 50'
            await talk.create(hand(("researcher", hand(("clerk", slow), ("clerk", slow))), ("clerk", slow)))
            await talk.until("subagent.called")
            for _ in range(2):
                await asyncio.sleep(0.7)
                stack.workers[-1].kill()
                stack.start_worker()
            events = await talk.until_boundary()

            root, below = await look(talk, talk.session_id), await members(talk, events)
            assert len(below) == 4
            assert plus(root["descendants"]["usage"]) == plus(*(each["usage"] for each in below))
            # Each reply was recorded once, and a worker that was killed could report nothing else.
            replies = [
                each["usage"]
                for member in below
                for each in of_type(await stream_of(talk, member["sessionId"]), "step.completed")
            ]
            assert plus(root["descendants"]["usage"]) == plus(*replies)
