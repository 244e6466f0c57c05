"""Families with real processes, in both kinds of turns; a module may have a stack of its own."""

from collections.abc import AsyncGenerator

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk


@pytest.fixture(scope="module", params=["child", "inline"])
def stack(module_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    return module_stack(
        provider=True, agents="tests.children.agents:agents", environment={"PERDURE_TURNS": request.param}
    )


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk
