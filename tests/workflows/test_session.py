"""The driver and its turns on a real server."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.requests import CallRef, Calls, Finished, ModelCall, ModelOutcome
from perdure.runtime.connect import connect
from perdure.settings import Settings
from tests.support.stack import TemporalServer

from .harness import Bench, Outside


@pytest.fixture
async def bench(temporal_server: TemporalServer) -> Bench:
    return Bench(await connect(Settings(temporal_address=temporal_server.address)))


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
async def working(bench: Bench, outside: Outside) -> AsyncGenerator[None]:
    async with bench.working(outside):
        yield


pytestmark = pytest.mark.usefixtures("working")


async def test_each_delivery_becomes_one_turn_in_order(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    for number in range(5):
        await session.deliver(f"dlv_{number}")

    await session.heard(*(f"dlv_{number}" for number in range(5)))
    assert [call.at.turn for call in outside.model_calls] == [0, 1, 2, 3, 4]


async def test_a_repeated_signal_is_heard_once(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    for delivery in ("dlv_1", "dlv_1", "dlv_2", "dlv_1"):
        await session.deliver(delivery)

    await session.heard("dlv_1", "dlv_2")


async def test_deliveries_during_a_turn_wait_for_it(bench: Bench, outside: Outside) -> None:
    gate = asyncio.Event()

    async def waits(call: ModelCall) -> ModelOutcome:
        await gate.wait()
        return Finished()

    outside.answer = waits
    session = await bench.start(outside)
    for number in range(3):
        await session.deliver(f"dlv_{number}", coalesce=number > 0)

    gate.set()

    await session.heard("dlv_0", "dlv_1", "dlv_2")
    assert [len(call.deliveries) for call in outside.model_calls] == [1, 2]


@pytest.mark.parametrize("signal", ["text", 7, None, [1, 2], {"id": 3}, {"tokenHash": "now"}, {"id": "x" * 100_000}])
async def test_a_signal_of_unknown_shape_leaves_the_session_alive(
    bench: Bench, outside: Outside, signal: object
) -> None:
    session = await bench.start(outside)

    await session.handle.signal(names.DELIVER, signal)
    await session.deliver("dlv_1")

    await session.heard("dlv_1")


async def test_an_unknown_signal_leaves_the_session_alive(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    await session.handle.signal("no-such-signal", {"a": 1})
    await session.deliver("dlv_1")

    await session.heard("dlv_1")


async def test_a_stale_token_is_refused_with_an_event(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    await session.deliver("dlv_old", token="yesterday")
    await session.deliver("dlv_1")

    await session.heard("dlv_1")
    assert [(refusal.delivery_id, refusal.code) for refusal in outside.refused] == [("dlv_old", "session_not_active")]


async def test_tools_of_a_step_run_before_the_next_model_call(bench: Bench, outside: Outside) -> None:
    async def asks(call: ModelCall) -> ModelOutcome:
        if call.at.step == 0:
            return Calls(calls=(CallRef(call_id="a", tool="a"), CallRef(call_id="b", tool="b")))
        return Finished()

    outside.answer = asks
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await outside.until(lambda: len(outside.model_calls) == 2)
    assert sorted(call.call.tool for call in outside.tool_calls) == ["a", "b"]


async def test_a_failure_that_no_step_told_is_concluded_and_the_next_message_works(
    bench: Bench, outside: Outside
) -> None:
    async def fails_first(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 0:
            raise ApplicationError("no", {"structural": False}, type="MODEL_CALL_FAILED", non_retryable=True)
        return Finished()

    outside.answer = fails_first
    session = await bench.start(outside)

    await session.deliver("dlv_1")
    await session.deliver("dlv_2")

    await session.heard("dlv_2")
    assert [told.failure.code for told in outside.concluded] == ["MODEL_CALL_FAILED"]


async def test_a_structural_failure_ends_the_session(bench: Bench, outside: Outside) -> None:
    async def gone(call: ModelCall) -> ModelOutcome:
        raise ApplicationError("gone", {"structural": True}, type="AGENT_GONE", non_retryable=True)

    outside.answer = gone
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await asyncio.wait_for(session.handle.result(), 20)
    assert [told.failure.code for told in outside.concluded] == ["AGENT_GONE"]


async def test_a_task_ends_with_its_turn(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, mode="task")

    await session.deliver("dlv_1")

    await asyncio.wait_for(session.handle.result(), 20)
    assert outside.heard == ["dlv_1"]


async def test_a_state_from_the_future_ends_the_session_with_a_reason(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, data={"version": 999, "sessionId": "x"})

    await asyncio.wait_for(session.handle.result(), 20)

    assert [told.failure.code for told in outside.concluded] == ["UNREADABLE_STATE"]
    assert outside.model_calls == []


async def test_a_terminated_turn_is_concluded_and_the_next_message_works(bench: Bench, outside: Outside) -> None:
    begun = asyncio.Event()

    async def hangs_first(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 0:
            begun.set()
            await asyncio.sleep(3600)
        return Finished()

    outside.answer = hangs_first
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await begun.wait()

    await bench.client.get_workflow_handle(names.turn_workflow(session.handle.id, 0)).terminate()
    await session.deliver("dlv_2")

    await session.heard("dlv_2")
    assert [told.failure.code for told in outside.concluded] == ["TURN_TERMINATED"]


async def test_a_renewed_run_forgets_nothing(bench: Bench, outside: Outside) -> None:
    # What a run that continued as new starts from.
    session = await bench.start(outside, turn=41, seen=["dlv_0"], inbox=[{"id": "dlv_1", "tokenHash": "now"}])

    await session.deliver("dlv_0")
    await session.deliver("dlv_2")

    await session.heard("dlv_1", "dlv_2")
    assert [call.at.turn for call in outside.model_calls] == [41, 42]


async def run_of(client: Client, handle: WorkflowHandle[object, object]) -> str | None:
    return (await client.get_workflow_handle(handle.id).describe()).run_id


async def test_three_hundred_signals_over_renewed_runs_are_heard_once_and_in_order(
    bench: Bench, outside: Outside
) -> None:
    session = await bench.start(outside)
    first_run = await run_of(bench.client, session.handle)

    expected = [f"dlv_{number}" for number in range(300)]
    for delivery in expected:
        await session.deliver(delivery)

    await outside.until(lambda: len(outside.heard) >= len(expected), within=100)
    assert outside.heard == expected
    assert await run_of(bench.client, session.handle) != first_run
    status = (await bench.client.get_workflow_handle(session.handle.id).describe()).status
    assert status == WorkflowExecutionStatus.RUNNING
