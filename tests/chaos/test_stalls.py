"""What readers are told while a turn has no worker; and that they are told nothing while it has one, or needs none."""

import pytest

from tests.support.chaos.scripts import call, drip, question
from tests.support.chaos.world import Caller, World, kept_types, runner_of
from tests.support.frames import watching
from tests.support.processes import PATIENCE
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

#: Seconds of the calls of tools. Those of the model keep five.
BEAT = 1


@pytest.fixture(scope="module", params=["child", "inline"])
def settings_of_all(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"PERDURE_HEARTBEAT_TIMEOUT": str(BEAT), "PERDURE_TURNS": request.param}


def is_inline(settings_of_all: str) -> bool:
    return settings_of_all == "inline"


async def test_readers_are_told_once_that_the_worker_is_gone_and_then_the_turn_goes_on(world: World) -> None:
    worker = world.only_worker()
    script = call("look", gate="before")
    async with world.caller() as caller:
        await caller.create(script.message)
        await until(lambda: world.ledger.reached(script.note), "the tool to be at its gate")
        async with watching(caller) as reader:
            worker.kill()
            await until(lambda: reader.stalls, "readers to be told", PATIENCE)
            async with watching(caller) as late:
                await until(lambda: late.stalls, "a later reader to be told, too", PATIENCE)
            kept = kept_types(world, caller.session_id)
            world.stack.start_worker()
            world.ledger.open(script.note)
            events = await caller.until_boundary()
            await until(lambda: len(reader.ids) == len(events), "the reader to have all events")

    [stall] = reader.stalls
    assert f":{worker.pid}:" in stall["heldBy"]
    begun = next(event["meta"]["at"] for event in events if event["type"] == "actions.requested")
    ended = next(event["meta"]["at"] for event in events if event["type"] == "action.result")
    assert begun < stall["since"] < ended
    assert late.stalls == [stall]
    # It is in no log, moves no index, and is no line of NDJSON.
    assert [id for id, event, _ in reader.frames if event == "session.stalled"] == [None]
    assert reader.ids == list(range(len(events)))
    assert "session.stalled" not in {*kept, *(event["type"] for event in events)}
    assert text(events) == script.answer


# A call of the model has five seconds, and stalls after ten.
@pytest.mark.slow_where.with_args(is_inline)
async def test_readers_are_told_when_the_worker_dies_while_the_model_speaks(world: World) -> None:
    worker = world.only_worker()
    script = drip(words=40, delay=50)
    async with world.caller() as caller:
        await caller.create(script.message)
        await caller.until("message.appended")
        async with watching(caller) as reader:
            worker.kill()
            await until(lambda: reader.stalls, "readers to be told", PATIENCE)
            world.stack.start_worker()
            events = await caller.until_boundary()

    assert [stall["heldBy"].split(":")[1] for stall in reader.stalls] == [str(worker.pid)]
    assert text(events).split() == script.answer.split()


@pytest.mark.slow_where.with_args(is_inline)
async def test_a_turn_whose_worker_lives_and_one_that_waits_for_people_do_not_stall(world: World) -> None:
    world.only_worker()
    script, asking = call("look", gate="before"), question()
    async with world.caller() as slow, world.caller() as parked:
        await parked.create(asking.message)
        await parked.until_boundary()
        await slow.create(script.message)
        await until(lambda: world.ledger.reached(script.note), "the tool to be at its gate")
        async with watching(slow) as of_slow, watching(parked) as of_parked:
            await until(lambda: heartbeats(world, slow), "four heartbeat timeouts without an event")
            told = [*of_slow.stalls, *of_parked.stalls]
            # Without any worker the one that runs stalls, and the one that waits for people still does not.
            world.kill_workers()
            await until(lambda: of_slow.stalls, "readers of the turn that runs to be told", PATIENCE)
            world.stack.start_worker()
            world.ledger.open(script.note)
            assert text(await slow.until_boundary()) == script.answer

    assert told == []
    assert of_parked.stalls == []


async def heartbeats(world: World, caller: Caller) -> bool:
    """Whether the call's worker has sent heartbeats for four timeouts."""
    [call] = (await (await runner_of(world, caller.session_id, 0)).describe()).raw_description.pending_activities
    beats = call.last_heartbeat_time.ToNanoseconds() - call.last_started_time.ToNanoseconds()
    return beats > 4 * BEAT * 1e9
