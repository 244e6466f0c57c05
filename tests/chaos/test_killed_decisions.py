"""`kill -9` of one worker after another, each while it decides for the same turn."""

import time

import pytest

from perdure.protocol import names
from tests.support.chaos.scripts import say
from tests.support.chaos.world import World, undisturbed
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

#: From the fourth attempt on the server gives a decision more time, and looks for a dead worker as much later: with its
#: defaults 5 s, 10 s, 20 s and so on, up to ten minutes. With our settings it is always this.
LENGTHENED = 5.0
#: What a worker needs to start, and a turn to run, is measured; so many turns in all.
TURNS = 3


async def test_a_decision_whose_workers_die_is_soon_tried_again_however_often(world: World) -> None:
    world.kill_workers()
    script = say()
    async with world.caller() as caller:
        await caller.create(script.message)
        for _ in range(6):
            doomed = world.dying_worker("in_decision")
            await until(lambda doomed=doomed: not doomed.alive, "a worker to die while it decides", 60)

        died = time.monotonic()
        heir = world.stack.start_worker()
        started = time.monotonic() - died
        events = await caller.until_boundary()
        took = time.monotonic() - died

        assert heir.alive
        decision = names.DRIVER_DECISION_SECONDS if world.runs_inline else names.TURN_DECISION_SECONDS
        bound = decision + LENGTHENED + started + TURNS * await undisturbed(caller)
        assert took < bound
        assert [event["data"]["message"] for event in events if event["type"] == "message.completed"] == [script.answer]
