"""Whose readers are told when there is no worker: those of the child that works, and not those of who waits for it."""

import pytest

from tests.support.frames import watching
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.waiting import until

from .test_subagents import hand

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("turns", ["child", pytest.param("inline", marks=pytest.mark.slow)])
async def test_a_session_that_waits_for_another_one_does_not_stall(make_stack: StackFactory, turns: str) -> None:
    stack = make_stack(provider=True, agents="tests.children.agents:agents", environment={"PERDURE_TURNS": turns})
    async with stack.talk() as parent, stack.talk() as child:
        await parent.create(hand(("clerk", "hang")))
        called = (await parent.until("subagent.called"))[-1]
        child.session_id = called["data"]["childSessionId"]
        await child.until("step.started")
        async with watching(parent) as of_parent, watching(child) as of_child:
            stack.workers[0].kill()
            await until(lambda: of_child.stalls, "readers of the child to be told", PATIENCE)

    assert of_parent.stalls == []
