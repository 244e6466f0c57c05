"""What a client learns of the drivers of sessions, from a real server."""

import asyncio
import contextlib

import pytest
from temporalio.client import WorkflowExecutionStatus

from perdure.errors import NoDriver, NoWorker
from perdure.protocol import names
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome
from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import Rebuild, SessionState
from tests.support.waiting import until
from tests.support.workflows import Bench, Outside

LOST = Rebuild(reason="WORKFLOW_LOST")


@pytest.fixture
def driver(bench: Bench) -> DriverClient:
    return DriverClient(bench.client, bench.settings.task_queue)


async def held(driver: DriverClient, session_id: str) -> frozenset[str]:
    view = await driver.describe(session_id)
    assert view is not None
    return view.holds


@pytest.mark.usefixtures("working")
async def test_a_driver_describes_what_waits_in_it(bench: Bench, outside: Outside, driver: DriverClient) -> None:
    session = await bench.start(outside, open=(OpenInput(request_id="inp_1"),))
    await session.deliver("dlv_1")
    await session.deliver("dlv_2")

    assert await held(driver, session.handle.id) == {"dlv_1", "dlv_2"}


@pytest.mark.usefixtures("working")
async def test_a_driver_describes_what_its_turn_reads(bench: Bench, outside: Outside, driver: DriverClient) -> None:
    found: list[frozenset[str]] = []

    async def answer(call: ModelCall) -> ModelOutcome:
        found.append(await held(driver, call.at.session_id))
        return Finished()

    outside.answer = answer
    session = await bench.start(outside)
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")
    assert found == [{"dlv_1"}]


@pytest.mark.usefixtures("working")
async def test_a_driver_describes_what_its_held_turn_would_read(
    bench: Bench, outside: Outside, driver: DriverClient
) -> None:
    request = {"sessionId": "x", "turn": 0, "agent": "demo", "deliveries": [{"id": "dlv_1", "tokenHash": "now"}]}
    session = await bench.start(outside, held=request, retry_at=2.0**40)

    assert await held(driver, session.handle.id) == {"dlv_1"}


@pytest.mark.usefixtures("working")
async def test_a_workflow_that_has_ended_or_never_was_holds_nothing(
    bench: Bench, outside: Outside, driver: DriverClient
) -> None:
    session = await bench.start(outside)
    await session.handle.terminate()

    for session_id in (session.handle.id, "ses_unknown"):
        with pytest.raises(NoDriver):
            await driver.describe(session_id)


async def test_without_a_worker_a_driver_cannot_be_described(
    bench: Bench, outside: Outside, driver: DriverClient
) -> None:
    session = await bench.start(outside)

    assert await driver.describe(session.handle.id) is None


async def test_no_session_is_started_on_a_queue_that_no_worker_polls(driver: DriverClient) -> None:
    with pytest.raises(NoWorker, match=r"task queue test-\w+-sessions"):
        await driver.rebuild("ses_unattended", LOST)
    assert await driver.status("ses_unattended") is None

    await driver.rebuild("ses_unattended", LOST, unattended=True)

    assert await driver.status("ses_unattended") is not None
    await driver.terminate("ses_unattended", "the test has ended")


async def test_a_workflow_that_runs_is_ended_and_deleted(bench: Bench, driver: DriverClient) -> None:
    session_id = f"ses_{bench.settings.task_queue}"
    await driver.rebuild(session_id, LOST, unattended=True)

    await driver.delete(session_id)

    async def ended() -> bool:
        return await driver.status(session_id) != WorkflowExecutionStatus.RUNNING

    await until(ended, "its end")
    # Temporal forgets it some time later; repeating is safe.
    await driver.delete(session_id)
    await driver.delete("ses_unknown")


@pytest.mark.usefixtures("working")
async def test_a_session_is_started_where_a_worker_polls(bench: Bench, outside: Outside, driver: DriverClient) -> None:
    session_id = f"ses_{bench.settings.task_queue}"
    outside.rebuilds = SessionState(session_id=session_id, agent="demo", token_hash="now").model_dump(mode="json")

    async with asyncio.timeout(60):
        while True:
            # The server learns of a worker with its first question.
            with contextlib.suppress(NoWorker):
                await driver.rebuild(session_id, LOST)
                break
            await asyncio.sleep(0.05)

    await outside.until(lambda: bool(outside.rebuilt))
    await bench.client.get_workflow_handle(session_id).signal(names.REPAIR, {"how": "fail"})
