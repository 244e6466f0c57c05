"""The driver and its turns on a real server."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import CallRef, Calls, Concluded, Finished, ModelCall, ModelOutcome, Parked, ToolCall
from tests.support.processes import PATIENCE
from tests.support.workflows import Answer, Bench, Outside, wait_beating

pytestmark = pytest.mark.usefixtures("working")


async def test_each_delivery_becomes_one_turn_in_order(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    for number in range(5):
        await session.deliver(f"dlv_{number}")

    await session.consumed(*(f"dlv_{number}" for number in range(5)))
    assert [call.at.turn for call in outside.model_calls] == [0, 1, 2, 3, 4]


async def test_a_repeated_signal_is_consumed_once(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    for delivery in ("dlv_1", "dlv_1", "dlv_2", "dlv_1"):
        await session.deliver(delivery)

    await session.consumed("dlv_1", "dlv_2")


async def test_deliveries_during_a_turn_wait_for_it(bench: Bench, outside: Outside) -> None:
    gate = asyncio.Event()

    async def waits(call: ModelCall) -> ModelOutcome:
        await wait_beating(gate)
        return Finished()

    outside.answer = waits
    session = await bench.start(outside)
    for number in range(3):
        await session.deliver(f"dlv_{number}", coalesce=number > 0)

    gate.set()

    await session.consumed("dlv_0", "dlv_1", "dlv_2")
    assert [len(call.deliveries) for call in outside.model_calls] == [1, 2]


async def test_a_message_to_be_collected_begins_a_turn_in_a_driver_that_waits_already(
    bench: Bench, outside: Outside
) -> None:
    session = await bench.start(outside)
    await session.deliver("dlv_0")
    await session.consumed("dlv_0")
    await session.idle()

    await session.deliver("dlv_1", coalesce=True)

    await session.consumed("dlv_0", "dlv_1")


async def test_a_delivery_that_waits_is_moved_by_a_later_signal_about_it(bench: Bench, outside: Outside) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def waits(call: ModelCall) -> ModelOutcome:
        begun.set()
        await wait_beating(gate)
        return Finished()

    outside.answer = waits
    session = await bench.start(outside)
    for number in range(4):
        await session.deliver(f"dlv_{number}", at=f"2026-11-20T12:00:00.00{number}Z")
    # Until its turn has begun, `dlv_0` waits, too, and `dlv_3` would be moved before it.
    await begun.wait()
    await session.deliver("dlv_3", at="2026-11-20T12:00:00.003Z", order="1", edits=2)
    # It was late: the delivery has been moved again since.
    await session.deliver("dlv_3", at="2026-11-20T12:00:00.003Z", order="2026-11-20T12:00:00.003Z5", edits=1)

    gate.set()

    await session.consumed("dlv_0", "dlv_3", "dlv_1", "dlv_2")


@pytest.mark.parametrize("signal", ["text", 7, None, [1, 2], {"id": 3}, {"tokenHash": "now"}, {"id": "x" * 100_000}])
async def test_a_signal_of_unknown_shape_leaves_the_session_alive(
    bench: Bench, outside: Outside, signal: object
) -> None:
    session = await bench.start(outside)

    await session.handle.signal(names.DELIVER, signal)
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")


@pytest.mark.parametrize("name", [names.DELIVER, names.CANCEL])
@pytest.mark.parametrize("arguments", [[], ["one", "two", "three"]])
async def test_a_signal_with_any_number_of_arguments_leaves_the_session_alive(
    bench: Bench, outside: Outside, name: str, arguments: list[str]
) -> None:
    session = await bench.start(outside)

    await session.handle.signal(name, args=arguments)
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")


async def test_an_unknown_signal_leaves_the_session_alive(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    await session.handle.signal("no-such-signal", {"a": 1})
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")


async def test_a_stale_token_is_refused_with_an_event(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    await session.deliver("dlv_old", token="yesterday")
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")
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


def many_calls(count: int, parallel: int | None) -> Calls:
    return Calls(calls=tuple(CallRef(call_id=f"c{number}", tool="act") for number in range(count)), parallel=parallel)


async def test_calls_run_a_few_at_a_time(bench: Bench, outside: Outside) -> None:
    running: set[str] = set()
    most = 0
    enough = asyncio.Event()

    async def asks(call: ModelCall) -> ModelOutcome:
        return many_calls(40, 4) if call.at.step == 0 else Finished()

    async def acts(call: ToolCall) -> None:
        nonlocal most
        running.add(call.call.call_id)
        most = max(most, len(running))
        if most == 4:
            enough.set()
        await enough.wait()
        # Long enough for one more to begin, if it may.
        await asyncio.sleep(0.02)
        running.discard(call.call.call_id)

    outside.answer, outside.act = asks, acts
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await outside.until(lambda: len(outside.model_calls) == 2)
    assert (len(outside.tool_calls), most) == (40, 4)


async def test_a_turn_with_more_calls_than_temporal_lets_it_have_open_can_be_cancelled(
    bench: Bench, outside: Outside
) -> None:
    begun = asyncio.Event()

    async def asks(call: ModelCall) -> ModelOutcome:
        # As a worker answers that knows no limits.
        return many_calls(2100, None) if call.at.turn == 0 else Finished()

    async def acts(call: ToolCall) -> None:
        begun.set()
        while True:
            activity.heartbeat()
            await asyncio.sleep(0.05)

    outside.answer, outside.act = asks, acts
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    async with asyncio.timeout(PATIENCE):
        await begun.wait()

    await session.handle.signal(names.CANCEL, {})
    await outside.until(lambda: bool(outside.concluded))
    await session.deliver("dlv_2")
    await session.consumed("dlv_1", "dlv_2")

    assert [made.kind for made in outside.concluded] == ["cancelled"]
    assert len(outside.tool_calls) <= 16


async def test_a_failure_that_no_step_recorded_is_concluded_and_the_next_message_works(
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

    await session.consumed("dlv_2")
    assert [made.failure.code for made in outside.concluded] == ["MODEL_CALL_FAILED"]


async def test_a_structural_failure_ends_the_session(bench: Bench, outside: Outside) -> None:
    async def gone(call: ModelCall) -> ModelOutcome:
        raise ApplicationError("gone", {"structural": True}, type="AGENT_GONE", non_retryable=True)

    outside.answer = gone
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await asyncio.wait_for(session.handle.result(), PATIENCE)
    assert [made.failure.code for made in outside.concluded] == ["AGENT_GONE"]


async def test_a_task_ends_with_its_turn(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, mode="task")

    await session.deliver("dlv_1")

    await asyncio.wait_for(session.handle.result(), PATIENCE)
    assert outside.consumed == ["dlv_1"]


@pytest.mark.parametrize("bench", ["child"], indirect=True)
async def test_a_terminated_turn_is_concluded_and_the_next_message_works(bench: Bench, outside: Outside) -> None:
    begun = asyncio.Event()

    async def hangs_first(call: ModelCall) -> ModelOutcome:
        begun.set()
        return await held(call) if call.at.turn == 0 else Finished()

    outside.answer = hangs_first
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await begun.wait()

    await bench.client.get_workflow_handle(names.turn_workflow(session.handle.id, 0)).terminate()
    await session.deliver("dlv_2")

    await session.consumed("dlv_2")
    assert [made.failure.code for made in outside.concluded] == ["TURN_TERMINATED"]


@pytest.mark.parametrize("bench", ["child"], indirect=True)
async def test_a_token_that_a_terminated_turn_has_set_is_the_sessions(bench: Bench, outside: Outside) -> None:
    begun = asyncio.Event()

    async def hangs_first(call: ModelCall) -> ModelOutcome:
        begun.set()
        return await held(call) if call.at.turn == 0 else Finished()

    outside.answer = hangs_first
    outside.concluded_as = Concluded(token_hash="later")
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await begun.wait()

    await bench.client.get_workflow_handle(names.turn_workflow(session.handle.id, 0)).terminate()
    await session.deliver("dlv_2", token="later")

    await session.consumed("dlv_2")
    assert outside.refused == []


async def test_a_renewed_run_forgets_nothing(bench: Bench, outside: Outside) -> None:
    # What a run that continued as new starts from.
    session = await bench.start(outside, turn=41, seen=["dlv_0"], inbox=[{"id": "dlv_1", "tokenHash": "now"}])

    await session.deliver("dlv_0")
    await session.deliver("dlv_2")

    await session.consumed("dlv_1", "dlv_2")
    assert [call.at.turn for call in outside.model_calls] == [41, 42]


async def run_of(client: Client, handle: WorkflowHandle[object, object]) -> str | None:
    return (await client.get_workflow_handle(handle.id).describe()).run_id


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.slow)])
async def test_many_signals_are_consumed_once_and_in_order_across_continue_as_new(
    bench: Bench, outside: Outside, count: int
) -> None:
    """A hundred are more than one run of the driver takes here."""
    session = await bench.start(outside)
    first_run = await run_of(bench.client, session.handle)

    expected = [f"dlv_{number}" for number in range(count)]
    for delivery in expected:
        await session.deliver(delivery)

    await outside.until(lambda: len(outside.consumed) >= len(expected), within=4 * PATIENCE)
    assert outside.consumed == expected
    assert await run_of(bench.client, session.handle) != first_run
    status = (await bench.client.get_workflow_handle(session.handle.id).describe()).status
    assert status == WorkflowExecutionStatus.RUNNING


async def held(call: ModelCall) -> ModelOutcome:
    """A model call that continues until it is cancelled."""
    del call
    while True:
        activity.heartbeat()
        await asyncio.sleep(0.05)


def asks(expires: float | None = None, remind: Sequence[float] = ()) -> Answer:
    """The first turn asks people, whom it gives so many seconds from then on; later ones end."""

    async def answer(call: ModelCall) -> ModelOutcome:
        if call.at.turn != 0:
            return Finished()
        now = time.time()
        remind_at = tuple(now + seconds for seconds in remind)
        expires_at = None if expires is None else now + expires
        return Parked(open=(OpenInput(request_id="inp_1", expires_at=expires_at, remind_at=remind_at),))

    return answer


async def test_answers_resume_a_parked_turn_and_messages_wait_behind_it(bench: Bench, outside: Outside) -> None:
    outside.answer = asks()
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await session.consumed("dlv_1")

    await session.deliver("dlv_2")
    await session.deliver("ans_1", kind="answer")

    await session.consumed("dlv_1", "ans_1", "dlv_2")
    assert [[each.request_id for each in resumption.open] for resumption in outside.resumptions] == [["inp_1"]]


async def test_a_request_expires_by_a_timer(bench: Bench, outside: Outside) -> None:
    outside.answer = asks(expires=0.5)
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await outside.until(lambda: bool(outside.resumptions))
    assert outside.resumptions[0].expired == ("inp_1",)


async def test_a_request_expires_while_no_worker_lives(bench: Bench, outside: Outside) -> None:
    """The working fixture's workers serve another queue here: this session's come and go."""
    away = Bench(bench.client)
    outside.answer = asks(expires=3.0)
    async with away.working(outside):
        session = await away.start(outside)
        await session.deliver("dlv_1")
        await session.consumed("dlv_1")
        expired = time.time() + 3.0

    while time.time() < expired:
        await asyncio.sleep(0.1)

    async with away.working(outside):
        await outside.until(lambda: bool(outside.resumptions))
    assert [resumption.expired for resumption in outside.resumptions] == [("inp_1",)]


async def test_reminders_come_before_the_expiry_and_each_once(bench: Bench, outside: Outside) -> None:
    outside.answer = asks(expires=3.0, remind=(1.0, 2.0))
    session = await bench.start(outside)

    await session.deliver("dlv_1")

    await outside.until(lambda: bool(outside.resumptions))
    assert [reminder.left for reminder in outside.reminders] == [1, 0]
