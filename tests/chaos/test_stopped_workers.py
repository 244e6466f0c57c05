"""A worker that has to stop while its tools still act."""

import asyncio
import json
import time

import pytest

from tests.support.chaos.scripts import call, say
from tests.support.chaos.world import Caller, World, runner_of, undisturbed
from tests.support.processes import Process
from tests.support.talk import text
from tests.support.waiting import until
from worker import GRACE

pytestmark = pytest.mark.chaos

#: What the end of the process takes on top of the time that tools may continue for, and as long as it took to start.
ENDING = 5.0
#: How long the signal may take to arrive, on top of so many turns as the machine is in that minute.
NOTICE = 1.0
TURNS = 3


async def test_a_worker_that_gets_a_stop_signal_starts_nothing(world: World) -> None:
    """People talk on while it waits for a slow tool; not one model call more is made, until another worker is there."""
    slow = call("put", gate="before")
    began = time.monotonic()
    worker = world.only_worker()
    starting = time.monotonic() - began
    acting = world.caller()
    async with world.caller() as other:
        await undisturbed(other)
        calm = TURNS * await undisturbed(other)
    await acting.create(slow.message)
    await until(lambda: world.ledger.reached(slow.note), "the tool to be at its gate")

    signalled, began = time.time(), time.monotonic()
    ending = asyncio.create_task(asyncio.to_thread(worker.terminate))
    waiting = await talk_until_it_ends(world, worker)
    code, took = await ending, time.monotonic() - began

    assert (code, took < GRACE.total_seconds() + ENDING + starting) == (0, True), worker.output
    assert [each.said for each in world.asked() if each.at > signalled + NOTICE + calm] == []
    # It said that it ended: the attempt does not count as a death.
    turn = await runner_of(world, acting.session_id, 0)
    [pending] = (await turn.describe()).raw_description.pending_activities
    assert [json.loads(each.data) for each in pending.heartbeat_details.payloads] == [{"deaths": 0, "ended": True}]
    # Nothing is lost: what it did not get to do, and what it could not finish, is done elsewhere.
    world.ledger.open(slow.note)
    world.stack.start_worker(wait=False)
    assert text(await acting.until_boundary()) == slow.answer
    for caller, answer in waiting:
        assert text(await caller.until_boundary()) == answer


async def talk_until_it_ends(world: World, worker: Process) -> list[tuple[Caller, str]]:
    """A new session every now and then; its caller, and the text that the model has to return."""
    waiting: list[tuple[Caller, str]] = []
    while worker.alive:
        caller, script = world.caller(), say()
        await caller.create(script.message)
        waiting.append((caller, script.answer))
        await asyncio.sleep(0.25)
    return waiting
