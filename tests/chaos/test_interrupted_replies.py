"""`kill -9` of the worker of a reply that its agent goes on with: what readers see on the way, and in the end."""

from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path

import pytest

from perdure.protocol.events import DELTAS
from tests.support.chaos.evidence import Json
from tests.support.chaos.scripts import drip, say
from tests.support.chaos.world import Caller, World, dies_at, kept_types, running_world
from tests.support.talk import text, types
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

#: Nobody but these workers dies, and they are not waited for longer than necessary.
SETTINGS = {"ON_INTERRUPTED_REPLY": "continue", "PERDURE_HEARTBEAT_TIMEOUT": "2"}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[World]:
    url = {} if request.param == "sqlite" else {"database_url": request.getfixturevalue("postgres_url")}
    with running_world(tmp_path, SETTINGS, workers=0, **url) as world:
        yield world
        await world.check()


async def pieces(world: World, caller: Caller, least: int) -> None:
    """Wait until readers have seen so many pieces of the reply."""

    def seen() -> bool:
        return kept_types(world, caller.session_id).count("message.appended") >= least

    await until(seen, f"{least} pieces of the reply")


def so_far(events: list[Json]) -> list[str]:
    return [each["data"][DELTAS[each["type"]][1]] for each in events if each["type"] == "message.appended"]


async def test_readers_see_one_message_grow_although_two_workers_die(world: World) -> None:
    script = drip(words=80, delay=40)
    async with world.caller() as caller:
        first = world.only_worker()
        await caller.create(script.message)
        await pieces(world, caller, 3)
        first.kill()
        second = world.stack.start_worker()
        await until(lambda: "step.recovered" in kept_types(world, caller.session_id), "the second worker to take over")
        known = kept_types(world, caller.session_id).count("message.appended")
        await pieces(world, caller, known + 3)
        second.kill()
        world.stack.start_worker()
        events = await caller.until_boundary()
        rest = await caller.until("message.completed", start=types(events).index("step.recovered") + 1)

        assert text(events) == script.answer
        assert types(events).count("message.completed") == 1
        assert "step.superseded" not in types(events)
        recovered = [each["data"] for each in events if each["type"] == "step.recovered"]
        assert [(each["attempt"], each["phase"], each["decision"]) for each in recovered] == [
            (2, "provider_started", "continue"),
            (3, "provider_started", "continue"),
        ]
        # No text is ever shorter than one before it, whole or resumed in the middle.
        grown = so_far(events)
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(grown))
        assert so_far(rest) == grown[-len(so_far(rest)) :]
        assert [each.begun is None for each in world.asked() if each.said == script.message] == [True, False, False]
        # The next turn is like any other.
        assert await caller.say((after := say()).message) == after.answer


async def test_a_reply_whose_worker_dies_when_it_is_complete_and_not_recorded_is_not_said_twice(
    world: World, tmp_path: Path
) -> None:
    script = drip(words=20, delay=40)
    doomed = world.only_worker(dies_at("model_before_settle", tmp_path / "once"))
    async with world.caller() as caller:
        await caller.create(script.message)
        await until(lambda: not doomed.alive, "the worker to die")
        world.stack.start_worker()

        events = await caller.until_boundary()

        assert text(events) == script.answer
        assert "step.recovered" in types(events)
