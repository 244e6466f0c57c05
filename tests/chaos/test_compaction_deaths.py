"""`kill -9` of a worker while it summarises, and between the summary and the step that it is for."""

from pathlib import Path

import pytest

from tests.support.chaos.scripts import say
from tests.support.chaos.world import Caller, World, dies_at, kept_types, running_world, unique
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

#: How often the summary is paid for when the worker dies there; the step itself is asked for once.
SUMMARIES = {"compaction_mid_call": 2, "compaction_after_record": 1}


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])]
)
async def test_a_recorded_summary_is_never_paid_for_again(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = {} if database == "sqlite" else {"database_url": request.getfixturevalue("postgres_url")}
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2"}
    with running_world(tmp_path, environment, workers=0, **url) as world:
        for point, times in SUMMARIES.items():
            doomed = world.only_worker(dies_at(point, tmp_path / f"{point}.once"))
            async with world.caller() as caller:
                await fill(caller)
                before = summaries_asked(world)
                script = say()
                await caller.send(script.message)
                await until(lambda doomed=doomed: not doomed.alive, f"the worker to die at {point}")
                world.stack.start_worker()
                events = await caller.until_boundary()

                assert text(events) == script.answer
                assert (point, summaries_asked(world) - before) == (point, times)
                assert world.times_asked(script.message) == 1
                types = kept_types(world, caller.session_id)
                assert types.count("compaction.requested") == types.count("compaction.completed") == 1
                following = say()
                assert await caller.say(following.message) == following.answer
        await world.check()


async def fill(caller: Caller) -> None:
    """One turn, after which the model's window is almost full."""
    await caller.create(f"weigh 95000; say {unique()} {'word ' * 3_000}")
    await caller.until_boundary()


def summaries_asked(world: World) -> int:
    return sum("replaced by a summary" in each.said for each in world.asked())
