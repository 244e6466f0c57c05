"""Tools of a pool run on its workers only, and wait for them."""

import asyncio
import logging

import pytest
from temporalio.service import RPCError

from perdure import InvalidDeclaration, tool
from perdure.agents.registry import AgentRegistry, pools_of
from perdure.errors import Invalid
from perdure.protocol import names
from perdure.runtime.deploys.builds import is_pool_served, warn_of_pools
from perdure.settings import Settings
from tests.runtime.pooled import agent
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json
from tests.support.waiting import until
from tests.support.workflows import Bench, Outside
from worker import activity_worker

AGENT = "tests.runtime.pooled:agent"


def outputs(events: list[Json]) -> list[str]:
    return [each["data"]["result"]["output"] for each in events if each["type"] == "action.result"]


async def pending(stack: Stack, session_id: str) -> list[tuple[str, int]]:
    """What the first turn of the session waits for at Temporal: the activities and their attempts so far."""
    handle = (await stack.client()).get_workflow_handle(names.turn_workflow(session_id, 0))
    try:
        found = (await handle.describe()).raw_description.pending_activities
    except RPCError:
        # It has not begun yet.
        return []
    return [(each.activity_type.name, each.attempt) for each in found if not each.HasField("last_started_time")]


@pytest.mark.parametrize("turns", ["child", "inline"])
async def test_a_tool_runs_on_a_worker_of_its_pool_and_other_tools_do_not(make_stack: StackFactory, turns: str) -> None:
    stack = make_stack(agents=AGENT, provider=True, environment={"PERDURE_TURNS": turns})
    # Without a key for the model: it calls none.
    gpu = stack.start_worker({"PERDURE_POOLS": "gpu", "OPENAI_API_KEY": ""})

    async with stack.talk() as talk:
        await talk.create("call where {} and anywhere {} then say done")
        events = await talk.until_boundary()

    assert sorted(outputs(events)) == sorted([f"process {gpu.pid}", f"process {stack.workers[0].pid}"])


async def test_a_call_waits_for_a_worker_of_its_pool(make_stack: StackFactory) -> None:
    stack = make_stack(agents=AGENT, provider=True)

    async with stack.talk() as talk:
        await talk.create("call where {} then say done")

        async def waits() -> bool:
            return await pending(stack, talk.session_id) == [(names.CALL_TOOL, 1)]

        await until(waits, "the call to wait")
        assert not await is_pool_served(await stack.client(), stack.settings.task_queue, "gpu")
        gpu = stack.start_worker({"PERDURE_POOLS": "gpu"})
        events = await talk.until_boundary()

        assert outputs(events) == [f"process {gpu.pid}"]
        assert await is_pool_served(await stack.client(), stack.settings.task_queue, "gpu")


async def test_other_workers_say_once_that_a_pool_has_no_worker(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    settings = bench.settings
    looking = asyncio.create_task(warn_of_pools(bench.client, settings.task_queue, ["gpu"], pause=0.01))
    try:
        await until(lambda: "no worker serves the pool gpu" in caplog.text, "the error")
        caplog.set_level(logging.INFO, logger="perdure.deploys")
        async with activity_worker(bench.client, settings, names.tools_queue("gpu"), [Outside().call_tool]):
            await until(lambda: "the pool gpu is served again" in caplog.text, "the news")
    finally:
        looking.cancel()

    assert caplog.text.count("no worker serves") == 1


async def test_a_call_that_waits_can_be_cancelled(make_stack: StackFactory) -> None:
    stack = make_stack(agents=AGENT, provider=True)

    async with stack.talk() as talk:
        await talk.create("call where {} then say done")
        await talk.until("actions.requested")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        events = await talk.until_boundary()

        assert "turn.cancelled" in [each["type"] for each in events]
        assert await talk.say("say hello") == "hello"


async def test_one_worker_may_serve_everything(make_stack: StackFactory) -> None:
    stack = make_stack(agents=AGENT, provider=True, environment={"PERDURE_POOLS": "all"})

    async with stack.talk() as talk:
        await talk.create("call where {} and anywhere {} then say done")
        events = await talk.until_boundary()

    assert outputs(events) == [f"process {stack.workers[0].pid}"] * 2


def test_the_pools_of_agents_are_those_of_their_tools() -> None:
    assert pools_of(AgentRegistry([agent])) == ("gpu",)


@pytest.mark.parametrize("pool", ["all", "GPU", "", "a b", "-", "x" * 64, 7])
def test_a_pool_needs_a_name_that_a_queue_can_have(pool: object) -> None:
    with pytest.raises(InvalidDeclaration, match="cannot be a pool"):

        @tool(pool=pool)  # pyright: ignore[reportCallIssue, reportArgumentType]
        def work() -> None: ...


def test_a_worker_refuses_pools_that_no_tool_can_have() -> None:
    with pytest.raises(Invalid, match="cannot be a pool"):
        _ = Settings(pools="gpu,a b").only_pools
