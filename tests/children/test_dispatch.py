"""The start of children, attempt by attempt."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from perdure import Agent, RemoteAgent
from perdure.errors import AgentGone
from perdure.protocol.requests import Coordinates, Delegated, DispatchChildren, StopChildren
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab

AT = Coordinates(session_id=SESSION, turn=0, step=0)


@pytest.fixture(params=["near", "away"])
async def it(request: pytest.FixtureRequest) -> AsyncGenerator[Lab]:
    """A session whose model has asked an agent here or elsewhere, which no worker knows any more."""
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        agent = Agent("tester", subagents=[Agent("near"), RemoteAgent("away", "http://away.example")])
        asked = ScriptedModel([call(request.param, message="Go")])
        it = Lab(store, agent, asked, "conversation", Settings(agents=""))
        assert isinstance(await it.model(await it.deliver("Go")), Delegated)
        it.agent = replace(agent, subagents=[])
        it.harness = it.worker()
        yield it
    finally:
        await store.close()


async def test_a_task_for_an_agent_that_no_worker_knows_waits_for_it(it: Lab) -> None:
    with pytest.raises(AgentGone):
        await it.harness.children.dispatch(DispatchChildren(at=AT))


async def test_a_cancelled_turn_does_not_wait_for_an_agent_that_no_worker_knows(it: Lab) -> None:
    assert await it.request_cancel()

    pending, created = await it.harness.children.dispatch(DispatchChildren(at=AT))
    stopped, requests = await it.harness.children.stop(StopChildren(at=AT))

    assert (len(pending.keys), created) == (1, [])
    assert (stopped.keys, requests) == ((), [])
    assert "subagent.called" not in [event.type for event in await it.store.events(SESSION, 0, 100)]
