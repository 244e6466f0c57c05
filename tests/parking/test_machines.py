"""The cells of the table in docs/resuming.md that machines bring about: one death, one deployment, all states."""

import asyncio
from collections.abc import Generator

import pytest
from temporalio.client import Client

from perdure.protocol import names
from tests.support.chaos.people import answer
from tests.support.chaos.world import World
from tests.support.fleet import build_of, make_current
from tests.support.talk import text

from .recovery import AFTER_A_CRASH, AFTER_A_DEPLOY
from .states import STATES, Case, child_on_approval, log, world_of_states

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

_FLEET = "fleet"
_CHILD = "child on approval"


async def one_of_each(world: World) -> dict[str, Case]:
    """A session in each state; each test has a caller of its own for it."""
    states = {**STATES, _CHILD: child_on_approval}
    arranged = await asyncio.gather(*(arrange(world) for arrange in states.values()))
    for case in arranged:
        await case.caller.http.aclose()
    return dict(zip(states, arranged, strict=True))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[World, dict[str, Case]]]:
    """The only worker is killed with a session in each state; another one comes."""
    with world_of_states(tmp_path_factory.mktemp("crashed")) as world:
        world.only_worker()
        cases = asyncio.run(one_of_each(world))
        world.only_worker()
        yield world, cases


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[World, dict[str, Case]]]:
    """Build 1 serves a session in each state when build 2 becomes current; build 1 lives on, as it should."""
    with world_of_states(tmp_path_factory.mktemp("deployed"), {"PERDURE_DEPLOYMENT": _FLEET}) as world:
        world.stack.start_worker({"PERDURE_BUILD_ID": "1"})
        asyncio.run(switch(world, "1"))
        cases = asyncio.run(one_of_each(world))
        world.stack.start_worker({"PERDURE_BUILD_ID": "2"})
        asyncio.run(switch(world, "2"))
        yield world, cases


@pytest.mark.parametrize("state", STATES)
async def test_after_a_crash(crashed: tuple[World, dict[str, Case]], state: str) -> None:
    case = taken_over(crashed, state)

    await AFTER_A_CRASH[state](case)


async def test_everything_holds_after_the_crash(crashed: tuple[World, dict[str, Case]]) -> None:
    await everything_holds(crashed)


@pytest.mark.parametrize("state", STATES)
async def test_after_a_deploy(deployed: tuple[World, dict[str, Case]], state: str) -> None:
    """What was running ends on its build; the next turn runs on the newest, and the driver follows it there.

    A turn that waits for others does not run: it goes on with the newest build, too.
    """
    case = taken_over(deployed, state)
    before = turns(case)

    await AFTER_A_DEPLOY[state](case)

    client = await case.world.stack.client()
    started = [await build_of(client, names.turn_workflow(case.caller.session_id, turn)) for turn in turns(case)]
    first = "2" if state.startswith("waiting for") else "1"
    assert started == [first] * len(before) + ["2"] * (len(started) - len(before))
    if state == "waiting for children":
        assert await build_of(client, names.turn_workflow(child_of(case), 0)) == "1"
    if state != "finished":
        assert "2" in started
        await moved(client, case.caller.session_id)


async def test_a_child_that_asks_goes_on_with_the_newest_build(deployed: tuple[World, dict[str, Case]]) -> None:
    case = taken_over(deployed, _CHILD)
    child = child_of(case)

    await answer(case.caller, case.approval)

    assert text(await case.caller.until_boundary()) == case.answer
    assert case.effects("pay") == 1
    client = await case.world.stack.client()
    assert [await build_of(client, names.turn_workflow(child, turn)) for turn in (0, 1)] == ["1", "2"]


async def test_everything_holds_after_the_deploy(deployed: tuple[World, dict[str, Case]]) -> None:
    await everything_holds(deployed)


# --- helpers ------------------------------------------------------------------------------------------------


async def everything_holds(arranged: tuple[World, dict[str, Case]]) -> None:
    world, cases = arranged
    # The tests of the states open the gates; some of them may run in another process, with another world.
    for case in cases.values():
        world.ledger.open(case.gate)
    await world.check()


def taken_over(arranged: tuple[World, dict[str, Case]], state: str) -> Case:
    world, cases = arranged
    case = cases[state]
    case.caller = world.caller(case.caller)
    return case


def turns(case: Case) -> list[int]:
    return [event["turn"] for event in log(case) if event["type"] == "turn.started"]


def child_of(case: Case) -> str:
    (child,) = [event["data"]["childSessionId"] for event in log(case) if event["type"] == "subagent.called"]
    return child


async def moved(client: Client, workflow_id: str) -> None:
    async with asyncio.timeout(60):
        while await build_of(client, workflow_id) != "2":
            await asyncio.sleep(0.05)


async def switch(world: World, build: str) -> None:
    await make_current(await world.stack.client(), _FLEET, build)
