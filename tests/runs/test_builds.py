"""Runs of versioned workers."""

from perdure.protocol import names
from perdure.protocol.runs import RunLooked
from tests.support.fleet import Fleet, Operator, build_of
from tests.support.fleet import fleet as fleet
from tests.support.fleet import operator as operator
from tests.support.waiting import until
from tests.support.workflows import Bench, Outside
from tests.support.workflows import bench as bench


async def test_a_run_that_waits_moves_to_the_current_build(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    first, second = Outside(), Outside()
    first.looks, second.looks = [RunLooked()], [RunLooked()]
    async with fleet.current("v1", first):
        run = await bench.start_run(first)

        async def waits() -> bool:
            return bool(first.bodies) and not (await run.handle.query(names.DESCRIBE))["inBody"]

        await until(waits, "the run to wait")
        assert await build_of(bench.client, run.handle.id) == "v1"
        async with fleet.current("v2", second):
            said = await operator.says("drain", "v1")
            moved = await build_of(bench.client, run.handle.id)

    assert said[-1] == "Nothing is left on build v1: its workers may stop."
    assert (moved, len(second.bodies)) == ("v2", 1)
