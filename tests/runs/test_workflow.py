"""The workflow of runs, over activities that a test scripts."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from temporalio import activity
from temporalio.client import WorkflowFailureError

from perdure.protocol import names
from perdure.protocol.runs import RunBody, RunLooked
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.reconciler import Reconciler
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_FAILED
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.runs import NewRun
from perdure.store.values import Commit, SessionChange
from tests.support import given
from tests.support.processes import PATIENCE
from tests.support.waiting import until
from tests.support.workflows import Bench, Driven, Outside
from tests.support.workflows import bench as bench
from tests.support.workflows import outside as outside
from tests.support.workflows import working as working


@pytest.mark.usefixtures("working")
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


class OfAnotherBuild(Outside):
    @activity.defn(name="enter_run")
    async def run_body(self, body: RunBody) -> RunLooked:
        return await Outside.run_body(self, body)


@pytest.fixture
async def store() -> AsyncGenerator[Store]:
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    yield store
    await store.close()


@pytest.mark.parametrize("is_to_fail", [False, True])
async def test_a_run_that_no_worker_can_replay_is_started_from_the_store(
    bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch, is_to_fail: bool
) -> None:
    first, second = OfAnotherBuild(), Outside()
    first.looks = [RunLooked()]
    with monkeypatch.context() as another_build:
        another_build.setattr(names, "RUN_BODY", "enter_run")
        async with bench.working(first):
            run = await bench.start_run(first)
            await first.until(lambda: bool(first.bodies))
            await until(lambda: _has_parked(run), "the run to wait")
    new = given.session(run.handle.id)
    await store.create_session(replace(new, token_hash="run", run=NewRun("nightly", {})))
    await store.commit(Commit(run.handle.id, change=SessionChange(status="running", turns=1)))

    driver = DriverClient(bench.client, bench.settings.task_queue)
    async with bench.working(second):
        if is_to_fail:
            await driver.repair(run.handle.id, "fail")
        else:
            await driver.deliver(run.handle.id, {})
        await until(lambda: _is_reported(driver, run), "Temporal to report the problem")
        await Reconciler(store, driver, replay_patience=0.0).reconcile()
        await second.until(lambda: bool(second.bodies))

    assert [each.ends for each in second.bodies] == [OPERATOR_FAILED if is_to_fail else None]


async def _has_parked(run: Driven) -> bool:
    return not (await run.handle.query(names.DESCRIBE))["inBody"]


async def _is_reported(driver: DriverClient, run: Driven) -> bool:
    return run.handle.id in (await driver.unreplayable() or {})
