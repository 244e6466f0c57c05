"""The only worker is killed while many sessions with long histories are busy, and another one starts."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Replayer

from perdure.runtime.connect import connect
from tests.support.plugin import StackFactory
from tests.support.talk import Talk
from worker import SANDBOX
from workflows.session import SessionWorkflow

from .world import HEARTBEAT, RECOVERY

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(400)]

SESSIONS = 30
TURNS = 50
#: What the histories may take against being replayed one after another, by one who does nothing else. The machine is
#: the server's too, and the new worker does more than replay.
AGAINST_REPLAYS = 1.5


async def test_a_restart_costs_little_more_than_one_replay_of_each_history(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, environment={"PERDURE_MODEL": "openai-chat:scripted"})
    sessions = [stack.talk() for _ in range(SESSIONS)]
    await asyncio.gather(*(grow(session) for session in sessions))
    undisturbed = await a_turn_of_each(sessions)
    replays = await replayed(await connect(stack.settings), sessions)

    # All of them are in the middle of a turn.
    await asyncio.gather(*(session.send("drip 20 words delay 30") for session in sessions))
    stack.workers[0].kill()
    stack.start_worker(wait=False)
    killed = time.monotonic()
    await asyncio.gather(*(session.until_boundary(within=200) for session in sessions))
    took = time.monotonic() - killed

    for session in sessions:
        await session.http.aclose()
    assert took < HEARTBEAT + RECOVERY + undisturbed + AGAINST_REPLAYS * replays, (undisturbed, replays)


async def grow(session: Talk) -> None:
    for _ in range(TURNS):
        await session.say("say on")


async def a_turn_of_each(sessions: Sequence[Talk]) -> float:
    began = time.monotonic()
    await asyncio.gather(*(session.say("say on") for session in sessions))
    return time.monotonic() - began


async def replayed(client: Client, sessions: Sequence[Talk]) -> float:
    """Seconds to fetch and replay what a new worker has to: the driver of each session, one after another."""
    replayer = Replayer(workflows=[SessionWorkflow], workflow_runner=SANDBOX, data_converter=client.data_converter)
    began = time.monotonic()
    for session in sessions:
        history: WorkflowHistory = await client.get_workflow_handle(session.session_id).fetch_history()
        await replayer.replay_workflow(history)
    return time.monotonic() - began
