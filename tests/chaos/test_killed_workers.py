"""`kill -9` of a worker at every place where it could matter."""

import time
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.talk import text

from .evidence import Json
from .scripts import Script, call, drip, say
from .world import HEARTBEAT, RECOVERY, World, dies_at, kept_types, reported, unique, until

pytestmark = [pytest.mark.chaos, pytest.mark.alone]

#: What the loss of a worker's cache may cost.
STICKY = 3.0

#: How often the model is asked in all, when its worker dies there.
MODEL = {
    "model_before_begin": 1,
    "model_after_begin": 1,
    "model_mid_stream": 2,
    "model_before_settle": 2,
    "model_after_settle": 1,
}

#: Effects of an at-most-once tool, and what its call is reported as, when its worker dies there.
TOOL = {
    "tool_before_intent": (1, "completed"),
    "tool_after_intent": (0, "unknown"),
    "tool_after_effect": (1, "unknown"),
    "tool_before_settle": (1, "unknown"),
    "tool_after_settle": (1, "completed"),
}


@pytest.mark.parametrize(("point", "asked"), MODEL.items())
async def test_a_text_turn_survives_its_worker(world: World, tmp_path: Path, point: str, asked: int) -> None:
    script, before = drip(), len(world.asked())

    events = await turn_with_a_death(world, script, point, tmp_path)

    assert text(events) == script.answer
    # And once for the turn that follows; nothing else was asked, under whatever words.
    assert (world.times_asked(script.message), len(world.asked()) - before) == (asked, asked + 1)
    assert ("step.superseded" in types(events)) == (point not in ("model_before_begin", "model_after_settle"))


@pytest.mark.parametrize(("point", "asked"), MODEL.items())
async def test_a_tool_turn_survives_its_worker_at_the_model(
    world: World, tmp_path: Path, point: str, asked: int
) -> None:
    script, before = call("charge"), len(world.asked())

    events = await turn_with_a_death(world, script, point, tmp_path)

    assert text(events) == script.answer
    assert (world.times_asked(script.message), len(world.asked()) - before) == (asked, asked + 2)
    assert len(world.ledger.of_call("charge", script.note)) == 1


@pytest.mark.parametrize(("point", "expected"), TOOL.items())
async def test_a_tool_that_may_act_once_acts_once(
    world: World, tmp_path: Path, point: str, expected: tuple[int, str]
) -> None:
    script = call("charge")

    events = await turn_with_a_death(world, script, point, tmp_path)

    assert (len(world.ledger.of_call("charge", script.note)), reported(events)) == expected
    assert text(events) == script.answer
    assert ("unknown" in what_the_model_was_told(world, script)) == (expected[1] == "unknown")


async def test_each_kind_of_tool_is_treated_as_it_declares(world: World) -> None:
    """One death for all three, with every effect done and no tool returned."""
    scripts = {tool: call(tool, gate="after") for tool in ("charge_in_thread", "put", "look")}
    doomed = world.only_worker()
    voices = {tool: world.voice() for tool in scripts}
    for tool, script in scripts.items():
        await voices[tool].create(script.message)
        await until(lambda script=script: world.ledger.reached(script.note), f"{tool} to be at its gate")

    doomed.kill()
    world.stack.start_worker(wait=False)
    for script in scripts.values():
        world.ledger.open(script.note)
    events = {tool: await voice.until_boundary() for tool, voice in voices.items()}

    came_to = {
        tool: (len(world.ledger.of_call(tool, script.note)), reported(events[tool])) for tool, script in scripts.items()
    }
    # The ledger honours the key of the idempotent one: had it changed, there would be two.
    assert came_to == {"charge_in_thread": (1, "unknown"), "put": (1, "completed"), "look": (2, "completed")}
    assert [text(events[tool]) for tool in scripts] == [script.answer for script in scripts.values()]


async def test_a_tool_that_was_done_is_not_done_again_for_the_sake_of_its_neighbour(world: World) -> None:
    doomed = world.only_worker()
    done, held = unique("n"), unique("n")
    message = f'call charge {{"note": "{done}"}} and charge {{"note": "{held}", "before": "{held}"}} then say over'

    async with world.voice() as voice:
        await voice.create(message)
        await until(lambda: world.ledger.reached(held), "the second call to be at its gate")
        await until(lambda: "action.result" in kept_types(world, voice.session_id), "the first call to be settled")
        doomed.kill()
        world.stack.start_worker(wait=False)
        events = await voice.until_boundary()

    statuses = [reported([event]) for event in events if event["type"] == "action.result"]
    assert statuses == ["completed", "unknown"]
    assert (len(world.ledger.of_call("charge", done)), len(world.ledger.of_call("charge", held))) == (1, 0)


async def test_a_worker_that_dies_between_two_turns_costs_little(world: World) -> None:
    """The sticky cache dies with it: whoever comes next waits for that no longer than three seconds."""
    first = world.only_worker()
    async with world.voice() as voice:
        await voice.say(say().message)
        world.stack.start_worker()
        first.kill()
        script = say()

        began = time.monotonic()
        answer = await voice.say(script.message)

        assert answer == script.answer
        assert time.monotonic() - began < STICKY


async def test_messages_wait_for_a_worker(world: World) -> None:
    world.kill_workers()
    scripts = [say() for _ in range(5)]

    async with world.voice() as voice:
        await voice.create(scripts[0].message)
        for script in scripts[1:]:
            await voice.send(script.message)
        world.only_worker()

        assert [text(await voice.until_boundary()) for _ in scripts] == [script.answer for script in scripts]


async def turn_with_a_death(world: World, script: Script, point: str, directory: Path) -> list[Json]:
    """Run one turn; its worker dies on the way, and another one takes over in time."""
    doomed = world.only_worker(dies_at(point, directory / "dead"))
    async with world.voice() as voice:
        await voice.create(script.message)
        died = await death(doomed)
        world.stack.start_worker(wait=False)
        events = await voice.until_boundary()
        recovered = time.monotonic()
        # Readers may have heard the end before the death. The next turn begins when this one is really over.
        following = say()
        assert await voice.say(following.message) == following.answer
    # The promise is that it begins to go on by then; here it has ended.
    assert recovered - died < HEARTBEAT + RECOVERY
    return events


async def death(worker: Process) -> float:
    """Wait until it is dead, and say when that was."""
    await until(lambda: not worker.alive, f"{worker.name} to die")
    return time.monotonic()


def what_the_model_was_told(world: World, script: Script) -> str:
    return next(each.results for each in world.asked() if (each.said, each.step) == (script.message, 1))


def types(events: list[Json]) -> list[str]:
    return [event["type"] for event in events]
