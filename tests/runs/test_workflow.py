"""The workflow of runs, over activities that a test scripts."""

import asyncio

import pytest
from temporalio import activity
from temporalio.client import WorkflowFailureError

from perdure.protocol import names
from perdure.protocol.runs import RunLooked
from perdure.session.state import OPERATOR_CANCELLED
from tests.support.processes import PATIENCE
from tests.support.workflows import Bench, Outside
from tests.support.workflows import bench as bench
from tests.support.workflows import outside as outside
from tests.support.workflows import working as working

pytestmark = pytest.mark.usefixtures("working")


async def test_a_workflow_that_is_cancelled_while_the_function_parks_ends_the_run(
    bench: Bench, outside: Outside
) -> None:
    begun = asyncio.Event()

    async def parks_although_it_is_cancelled() -> None:
        begun.set()
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            # What a look does that is over before it learns of this.
            del outside.before[names.RUN_BODY]

    outside.before[names.RUN_BODY] = parks_although_it_is_cancelled
    outside.looks = [RunLooked()]
    run = await bench.start_run(outside)
    await begun.wait()

    await run.handle.cancel()

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(WorkflowFailureError):
            await run.handle.result()
    assert [each.ends for each in outside.bodies] == [None, OPERATOR_CANCELLED]
