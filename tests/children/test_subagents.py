"""Turns that hand work to other agents, with real processes."""

import json
from typing import Any

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text, types


@pytest.fixture(scope="module", params=["child", "inline"])
def stack(module_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    return module_stack(
        provider=True, agents="tests.children.agents:agents", environment={"PERDURE_TURNS": request.param}
    )


def call(name: str, **arguments: Any) -> str:
    return f"call {name} {json.dumps(arguments)}"


async def test_the_result_of_a_subagent_comes_back_to_the_turn_that_asked(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create(call("researcher", message="say Found it"))
        events = await talk.until_boundary()

    assert text(events) == "Results: Found it"
    assert types(events) == []
