"""A worker is frozen past its heartbeat, another one finishes, and the first one wakes up."""

import pytest

from tests.support.processes import Process
from tests.support.talk import text

from .evidence import Evidence
from .scripts import Script, call, drip, say
from .world import World, until

pytestmark = pytest.mark.chaos

#: What a zombie logs when the store refuses it.
_REFUSED = "A newer attempt has taken over"


async def test_a_model_call_that_wakes_up_writes_nothing(world: World) -> None:
    zombie = world.only_worker()
    script = drip(words=40, delay=40)

    async with world.voice() as voice:
        await voice.create(script.message)
        await until(lambda: "message.appended" in kept_types(world, voice.session_id), "the model to speak")
        zombie.stop()
        world.stack.start_worker()
        answer = text(await voice.until_boundary())
        before = world.store()

        zombie.cont()
        await until(lambda: _REFUSED in zombie.output, "the zombie to be refused")

        assert_untouched(before, world.store())
        assert answer == script.answer
        assert world.times_asked(script.message) == 2
        following = say()
        assert await voice.say(following.message) == following.answer
    leave(zombie)


@pytest.mark.parametrize("tool", ["charge", "charge_in_thread"])
async def test_a_tool_that_wakes_up_before_its_effect_changes_no_word(world: World, tool: str) -> None:
    """Nobody can hold its effect back. But it is the only one, and what was said of it stays true: unknown."""
    script = call(tool, gate="before")
    zombie, before = await finished_by_another(world, script)

    assert len(world.ledger.of_call(tool, script.note)) == 0
    world.ledger.open(script.note)
    zombie.cont()
    await until(lambda: world.ledger.of_call(tool, script.note), "the zombie to act")
    leave(zombie)

    assert_untouched(before, world.store())
    assert len(world.ledger.of_call(tool, script.note)) == 1


async def test_a_tool_that_wakes_up_after_its_effect_changes_no_word(world: World) -> None:
    script = call("charge", gate="after")
    zombie, before = await finished_by_another(world, script)

    assert len(world.ledger.of_call("charge", script.note)) == 1
    world.ledger.open(script.note)
    zombie.cont()
    leave(zombie)

    assert_untouched(before, world.store())
    assert len(world.ledger.of_call("charge", script.note)) == 1


async def test_an_idempotent_tool_that_wakes_up_acts_under_the_key_of_the_other(world: World) -> None:
    script = call("put", gate="before")
    zombie = await frozen_at_the_gate(world, script)
    world.stack.start_worker()
    world.ledger.open(script.note)
    before = await world.settled(within=60)

    zombie.cont()
    leave(zombie)

    assert_untouched(before, world.store())
    assert len(world.ledger.of_call("put", script.note)) == 1


async def finished_by_another(world: World, script: Script) -> tuple[Process, Evidence]:
    """Let a worker freeze at the gate of a tool, and another one end the turn."""
    zombie = await frozen_at_the_gate(world, script)
    world.stack.start_worker()
    return zombie, await world.settled(within=60)


async def frozen_at_the_gate(world: World, script: Script) -> Process:
    zombie = world.only_worker()
    async with world.voice() as voice:
        await voice.create(script.message)
    await until(lambda: world.ledger.reached(script.note), "the tool to be at its gate")
    zombie.stop()
    return zombie


def leave(zombie: Process) -> None:
    """Let it do whatever it still wants to do, and go."""
    assert zombie.terminate(within=30) == 0, zombie.output


def assert_untouched(before: Evidence, now: Evidence) -> None:
    assert now.events == before.events
    assert now.records == before.records
    assert now.sessions == before.sessions


def kept_types(world: World, session_id: str) -> list[str]:
    return [event["type"] for event in world.store().events.get(session_id, ())]
