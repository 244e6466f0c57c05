"""`kill -9` of worker and API in the middle of a long job: what the model is told of its progress when it goes on."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from perdure import SessionView
from perdure.harness.prompt import instructions_of
from perdure.protocol.deliveries import LOCAL
from tests.support.chaos.world import World, kept_types, running_world, unique
from tests.support.talk import text
from tests.support.waiting import until

from .mission import agent

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(params=["child", pytest.param("inline", marks=pytest.mark.slow)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[World]:
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2", "PERDURE_TURNS": request.param}
    with running_world(tmp_path, environment, agents="tests.chaos.mission:agent") as world:
        yield world
        await world.check()


def done(step: int) -> str:
    return f'call planning_update_step {{"step_id": {step}, "status": "done"}}'


PLAN = {"objective": "Ship it", "initial_steps": ["design", "build", "test", "release"]}
#: Two steps of four are done when the fourth model call is made.
BEGUN = (f"call planning_setup_plan {json.dumps(PLAN)}", done(1), done(2))


def kill_all_but_store_and_temporal(world: World) -> None:
    world.kill_workers()
    for api in world.stack.apis:
        api.kill()


def go_on(world: World) -> None:
    world.stack.start_api(wait=False)
    world.stack.start_worker()


async def rendered(world: World, session_id: str) -> str:
    """The instructions as a process makes them that has never served the session."""
    store = await world.stack.store()
    try:
        return await instructions_of(store, agent, SessionView(session_id, agent.name, 0, 0, LOCAL))
    finally:
        await store.close()


def instructions(world: World, message: str, step: int) -> list[str]:
    """What each request for this step has told the model."""
    return [each.instructions for each in world.asked() if (each.said, each.step) == (message, step)]


async def test_a_job_goes_on_with_what_is_done_and_what_is_left(world: World) -> None:
    gate, word = unique("g"), unique()
    put = f"call put {json.dumps({'note': gate, 'before': gate})}"
    message = " then ".join((*BEGUN, put, done(3), done(4), f"say {word}"))
    async with world.caller() as caller:
        await caller.create(message)
        await until(lambda: world.ledger.reached(gate), "the tool of the third step to run")
        kill_all_but_store_and_temporal(world)
        fresh = await rendered(world, caller.session_id)
        world.ledger.open(gate)
        go_on(world)

        async with world.caller(caller) as after:
            events = await after.until_boundary()

    (told,) = instructions(world, message, 4)
    assert told.startswith(f"{fresh}\n\n")
    for line in ("✓ design", "✓ build", "- test (pending)", "- release (pending)", "2 steps are left."):
        assert told.count(line) == 1
    assert text(events) == word
    plan = [each["data"]["plan"] for each in events if each["type"] == "plan.updated"][-1]
    assert (plan["status"], len(plan["steps"])) == ("completed", 4)


async def test_a_model_call_that_is_made_again_is_told_the_same(world: World) -> None:
    word = unique()
    message = " then ".join((*BEGUN, f"drip 60 words delay 40; {done(3)}", done(4), f"say {word}"))
    async with world.caller() as caller:
        await caller.create(message)
        await until(
            lambda: kept_types(world, caller.session_id).count("message.appended") >= 3, "pieces of the fourth reply"
        )
        kill_all_but_store_and_temporal(world)
        fresh = await rendered(world, caller.session_id)
        go_on(world)

        async with world.caller(caller) as after:
            events = await after.until_boundary()

    before, again = instructions(world, message, 3)
    assert before == again
    assert again.startswith(f"{fresh}\n\n")
    assert [again.count(mark) for mark in ("✓ ", "(pending)")] == [2, 2]
    assert text(events) == word


async def test_a_model_that_never_plans_goes_on_just_as_well(world: World) -> None:
    gate, word = unique("g"), unique()
    calls = [f"call put {json.dumps({'note': unique('n')})}", f"call put {json.dumps({'note': gate, 'before': gate})}"]
    message = " then ".join((*calls, f"say {word}"))
    async with world.caller() as caller:
        await caller.create(message)
        await until(lambda: world.ledger.reached(gate), "the second tool to run")
        kill_all_but_store_and_temporal(world)
        fresh = await rendered(world, caller.session_id)
        world.ledger.open(gate)
        go_on(world)

        async with world.caller(caller) as after:
            events = await after.until_boundary()

    (told,) = instructions(world, message, 2)
    assert told.startswith(f"{fresh}\n\n")
    assert told.count("No progress yet. Create a plan to get started.") == 1
    assert text(events) == word
    # What was done before the deaths is not done again.
    assert [world.times_asked(message, step) for step in range(3)] == [1, 1, 1]
