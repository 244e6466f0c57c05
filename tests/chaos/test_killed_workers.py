"""`kill -9` of a worker at every place where it could matter.

The places are in activities, which do not know what runs their turn. So turns with a workflow of their own die at each
of them, and inline turns at some: where they leave a part of an answer, all of it, nothing of a tool, or its effect
without an outcome. `make chaos` has the others.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.cases import parameters_of
from tests.support.chaos.evidence import Json
from tests.support.chaos.scripts import Script, call, drip, say
from tests.support.chaos.world import (
    HEARTBEAT,
    RECOVERY,
    STICKY,
    World,
    dies_at,
    kept_types,
    reported,
    undisturbed,
    unique,
)
from tests.support.talk import text, types
from tests.support.waiting import until

from .lanes import AFTERWARDS, Lane, side_by_side

pytestmark = pytest.mark.chaos

#: The deaths are died once for all tests; processes beside each other would each die them for themselves.
dies_once = pytest.mark.deaths

#: The turns whose time is added to a bound: as much as the machine needs in that minute. One with a tool asks the
#: model twice.
TURNS = 4

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

#: Where inline turns die in each run of the tests, by what is under way.
INLINE = {
    *(("text", point) for point in ("model_mid_stream", "model_after_settle")),
    *(("call", point) for point in ("model_before_settle", "tool_before_intent", "tool_after_effect")),
}


def is_one_of_many(settings_of_all: str, kind: str, point: str) -> bool:
    return settings_of_all == "inline" and (kind, point) not in INLINE


one_of_many = pytest.mark.slow_where.with_args(is_one_of_many)


@pytest.fixture(scope="module", params=["child", "inline"])
def settings_of_all(request: pytest.FixtureRequest) -> dict[str, str]:
    """Who says nothing is taken for dead sooner than elsewhere: many die here."""
    return {"PERDURE_HEARTBEAT_TIMEOUT": "2", "PERDURE_TURNS": request.param}


@dataclass(frozen=True)
class Turn:
    """One turn, whose worker died on the way."""

    script: Script
    events: list[Json]
    #: Seconds from the death to the end of the turn, and how many they may be. The promise is that it continues by
    #: then; here it has ended.
    took: float
    bound: float


@dataclass(frozen=True)
class Deaths:
    """All of them, by what was under way and where the worker died; and how often the provider was asked what."""

    turns: dict[tuple[str, str], Turn]
    asked: Counter[str]


@pytest.fixture(scope="module")
def deaths(request: pytest.FixtureRequest, shared_world: World, tmp_path_factory: pytest.TempPathFactory) -> Deaths:
    """Those that the chosen tests look at."""
    directory = tmp_path_factory.mktemp("deaths")
    turns = "inline" if shared_world.runs_inline else "child"
    chosen = [parameters_of(item) for item in request.session.items if item.path == request.path]
    keys = [(each["kind"], each["point"]) for each in chosen if "kind" in each and each["settings_of_all"] == turns]
    plays = {
        (kind, point): partial(turn_with_a_death, kind=kind, point=point, once=directory / f"{kind}-{point}")
        for kind, point in keys
    }
    turns = asyncio.run(side_by_side(shared_world, plays))
    return Deaths(turns, Counter(each.said for each in shared_world.asked()))


@dies_once
@one_of_many
@pytest.mark.parametrize(("kind", "point", "asked"), [("text", *each) for each in MODEL.items()])
async def test_a_text_turn_survives_its_worker(world: World, deaths: Deaths, kind: str, point: str, asked: int) -> None:
    turn = deaths.turns[kind, point]

    assert text(turn.events) == turn.script.answer
    assert world.times_asked(turn.script.message) == asked
    assert ("step.superseded" in types(turn.events)) == (point not in ("model_before_begin", "model_after_settle"))
    assert turn.took < turn.bound


@dies_once
@one_of_many
@pytest.mark.parametrize(("kind", "point", "asked"), [("call", *each) for each in MODEL.items()])
async def test_a_tool_turn_survives_its_worker_at_the_model(
    world: World, deaths: Deaths, kind: str, point: str, asked: int
) -> None:
    turn = deaths.turns[kind, point]

    assert text(turn.events) == turn.script.answer
    assert (world.times_asked(turn.script.message), world.times_asked(turn.script.message, 1)) == (asked, 1)
    assert len(world.ledger.of_call("charge", turn.script.note)) == 1
    assert turn.took < turn.bound


@dies_once
@one_of_many
@pytest.mark.parametrize(("kind", "point", "expected"), [("call", *each) for each in TOOL.items()])
async def test_a_tool_that_may_act_once_acts_once(
    world: World, deaths: Deaths, kind: str, point: str, expected: tuple[int, str]
) -> None:
    turn = deaths.turns[kind, point]

    assert (len(world.ledger.of_call("charge", turn.script.note)), reported(turn.events)) == expected
    assert text(turn.events) == turn.script.answer
    assert ("unknown" in what_the_model_got(world, turn.script)) == (expected[1] == "unknown")
    assert turn.took < turn.bound


@dies_once
async def test_nothing_else_was_asked_under_whatever_words(deaths: Deaths) -> None:
    """Once for each turn that follows those whose worker died."""
    scripts = [turn.script.message for turn in deaths.turns.values()]
    assert scripts, "run it together with the tests of deaths"
    others = {said: times for said, times in deaths.asked.items() if said not in scripts}

    assert sorted(others.values()) == [1] * (len(scripts) * AFTERWARDS)


async def test_each_kind_of_tool_is_treated_as_it_declares(world: World) -> None:
    """One death for all three, with every effect done and no tool returned."""
    scripts = {tool: call(tool, gate="after") for tool in ("charge_in_thread", "put", "look")}
    doomed = world.only_worker()
    callers = {tool: world.caller() for tool in scripts}
    for tool, script in scripts.items():
        await callers[tool].create(script.message)
        await until(lambda script=script: world.ledger.reached(script.note), f"{tool} to be at its gate")

    doomed.kill()
    world.stack.start_worker(wait=False)
    for script in scripts.values():
        world.ledger.open(script.note)
    events = {tool: await caller.until_boundary() for tool, caller in callers.items()}

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

    async with world.caller() as caller:
        await caller.create(message)
        await until(lambda: world.ledger.reached(held), "the second call to be at its gate")
        await until(lambda: "action.result" in kept_types(world, caller.session_id), "the first call to be settled")
        doomed.kill()
        world.stack.start_worker(wait=False)
        events = await caller.until_boundary()

    statuses = [reported([event]) for event in events if event["type"] == "action.result"]
    assert statuses == ["completed", "unknown"]
    assert (len(world.ledger.of_call("charge", done)), len(world.ledger.of_call("charge", held))) == (1, 0)


async def test_a_worker_that_dies_between_two_turns_costs_little(world: World) -> None:
    """The sticky cache dies with it: the next worker waits for that no longer than three seconds."""
    first = world.only_worker()
    async with world.caller() as caller:
        await caller.say(say().message)
        before = await undisturbed(caller)
        world.stack.start_worker()
        first.kill()
        script = say()

        began = time.monotonic()
        await caller.send(script.message)
        events = await caller.until_boundary()
        took = time.monotonic() - began

        assert text(events) == script.answer
        # The server may hand a task to the dead worker while it still takes the connection for alive.
        handed_over = any(event["meta"].get("attempt", 1) > 1 for event in events)
        bound = STICKY + TURNS * max(before, await undisturbed(caller))
        assert took < bound + (HEARTBEAT + RECOVERY if handed_over else 0)


async def test_a_step_that_kills_each_worker_ends_its_turn_and_not_that_of_its_neighbour(world: World) -> None:
    killer, neighbour = call("put"), drip(words=60, delay=50)
    world.kill_workers()
    async with world.caller() as killing, world.caller() as beside:
        deadly = {"PERDURE_KILL_POINT": "tool_after_effect"}
        world.stack.start_worker(deadly)
        await beside.create(neighbour.message)
        await until(lambda: world.times_asked(neighbour.message), "the neighbour to be answered")
        await killing.create(killer.message)
        for _ in range(2):
            await until(lambda: not world.stack.workers[-1].alive, "the worker to die")
            world.stack.start_worker(deadly, wait=False)
        await until(lambda: not world.stack.workers[-1].alive, "the third worker to die")
        world.only_worker()
        failed = await killing.until_boundary()
        events = await beside.until_boundary()

    [failure] = [event["data"] for event in failed if event["type"] == "turn.failed"]
    assert failure["code"] == "STEP_KILLS_WORKERS"
    # Its key is the same in each attempt.
    assert len(world.ledger.of_call("put", killer.note)) == 1
    assert text(events) == neighbour.answer
    assert world.times_asked(neighbour.message) <= 4


async def test_messages_wait_for_a_worker(world: World) -> None:
    world.kill_workers()
    scripts = [say() for _ in range(5)]

    async with world.caller() as caller:
        await caller.create(scripts[0].message)
        for script in scripts[1:]:
            await caller.send(script.message)
        world.only_worker()

        assert [text(await caller.until_boundary()) for _ in scripts] == [script.answer for script in scripts]


async def turn_with_a_death(lane: Lane, *, kind: str, point: str, once: Path) -> Turn:
    """Run one turn; its worker dies on the way, and another one takes over in time."""
    script = drip() if kind == "text" else call("charge", slowly=point == "model_mid_stream")
    doomed = lane.worker(dies_at(point, once))
    async with lane.caller() as caller:
        await caller.create(script.message)
        heir = await lane.takes_over(doomed)
        events = await caller.until_boundary()
        took = time.monotonic() - heir.died
        bound = await heir.bound(caller, TURNS)
    heir.process.kill()
    return Turn(script, events, took, bound)


def what_the_model_got(world: World, script: Script) -> str:
    return next(each.results for each in world.asked() if (each.said, each.step) == (script.message, 1))
