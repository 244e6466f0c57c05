"""The only worker is killed while many sessions with long histories are busy, and another one starts.

Other counts: `PERDURE_RESTART_SESSIONS=500 PERDURE_RESTART_ACTIVE=50 PERDURE_RESTART_TURNS=300`.
A driver continues as new after about fifteen turns, so more turns than that make no history longer.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import pytest
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Replayer

from perdure.runtime.connect import temporal_client
from tests.support.chaos.world import HEARTBEAT, RECOVERY
from tests.support.plugin import StackFactory
from tests.support.talk import Talk
from worker import SANDBOX
from workflows.session import SessionWorkflow

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(7200)]

SESSIONS = int(os.environ.get("PERDURE_RESTART_SESSIONS", "100"))
ACTIVE = int(os.environ.get("PERDURE_RESTART_ACTIVE", "30"))
TURNS = int(os.environ.get("PERDURE_RESTART_TURNS", "40"))
log = logging.getLogger(__name__)

#: Sessions that grow at the same time.
CROWD = 50
#: What the histories may take against being replayed one after another, by one who does nothing else. The machine is
#: the server's too, and the new worker does more than replay.
AGAINST_REPLAYS = 1.5


async def test_a_restart_costs_little_more_than_one_replay_of_each_busy_history(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, environment={"PERDURE_MODEL": "openai-chat:scripted"})
    sessions = [stack.talk() for _ in range(SESSIONS)]
    await grow(sessions)
    active = sessions[:ACTIVE]
    undisturbed = await a_turn_of_each(active)
    replays = await replayed(await temporal_client(stack.settings), active)

    # These are in the middle of a turn, and all the others wait for their next message.
    await asyncio.gather(*(session.send("drip 20 words delay 30") for session in active))
    stack.workers[0].kill()
    stack.start_worker(wait=False)
    killed = time.monotonic()
    await asyncio.gather(*(session.until_boundary(within=200) for session in active))
    took = time.monotonic() - killed
    for session in sessions[ACTIVE : ACTIVE + 10]:
        await session.say("say on")

    for session in sessions:
        await session.http.aclose()
    log.info("%d sessions, %d active, %d turns: %.1f s; replays %.1f s", SESSIONS, ACTIVE, TURNS, took, replays)
    assert took < HEARTBEAT + RECOVERY + undisturbed + AGAINST_REPLAYS * replays, (undisturbed, replays)


async def grow(sessions: Sequence[Talk]) -> None:
    places = asyncio.Semaphore(CROWD)

    async def grow_one(session: Talk) -> None:
        async with places:
            for _ in range(TURNS):
                await session.say("say on")

    await asyncio.gather(*(grow_one(session) for session in sessions))


async def a_turn_of_each(sessions: Sequence[Talk]) -> float:
    began = time.monotonic()
    await asyncio.gather(*(session.say("say on") for session in sessions))
    return time.monotonic() - began


async def replayed(client: Client, sessions: Sequence[Talk]) -> float:
    """Seconds to fetch and replay what a new worker has to: the driver of each session, one after another."""
    replayer = Replayer(
        workflows=[SessionWorkflow], workflow_runner=SANDBOX, data_converter=client.data_converter, debug_mode=True
    )
    began = time.monotonic()
    for session in sessions:
        history: WorkflowHistory = await client.get_workflow_handle(session.session_id).fetch_history()
        await replayer.replay_workflow(history)
    return time.monotonic() - began
