"""What a driver does when it, its turn or its operator cannot continue as usual."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, TypeAdapter
from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Conclusion,
    Failure,
    Finished,
    ModelCall,
    ModelOutcome,
    Parked,
    ToolCall,
    ToolOutcome,
)
from perdure.runtime.connect import temporal_client
from perdure.session.state import Rebuild, SessionState
from perdure.settings import Settings
from tests.support.processes import PATIENCE
from tests.support.stack import TemporalServer
from tests.support.workflows import Bench, Driven, Outside
from workflows import turn, versions
from workflows.session import SessionWorkflow

from .test_replay import a_replayer

GONE = ApplicationError("no such agent", {"held": True}, type="AGENT_GONE", non_retryable=True)
ASKED = OpenInput(request_id="inp_1")


pytestmark = pytest.mark.usefixtures("working")


async def status(session: Driven) -> WorkflowExecutionStatus | None:
    return (await session.handle.describe()).status


async def ended(session: Driven) -> WorkflowExecutionStatus | None:
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(WorkflowFailureError):
            await session.handle.result()
    return await status(session)


async def described(session: Driven, holds: Callable[[dict[str, object]], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds(await session.handle.query(names.DESCRIBE)):
            await asyncio.sleep(0.05)


class Serving:
    """Workers that can serve the session, or cannot for a while."""

    def __init__(self) -> None:
        self.gone = True

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        if self.gone:
            raise GONE
        return Finished()


async def test_a_turn_that_no_worker_can_serve_is_held_and_continues_with_the_next_delivery(
    bench: Bench, outside: Outside
) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    serving.gone = False
    await session.deliver("dlv_2")

    await session.consumed("dlv_1", "dlv_2")
    assert [call.at.turn for call in outside.model_calls] == [0, 1]
    assert [attend.attention and attend.attention.code for attend in outside.attended] == ["AGENT_GONE"]
    assert (outside.concluded, await status(session)) == ([], WorkflowExecutionStatus.RUNNING)


async def test_an_outcome_that_this_build_cannot_read_holds_the_turn_and_not_the_session(
    bench: Bench, outside: Outside
) -> None:
    outcomes: list[Any] = [{"kind": "of a newer build"}]

    async def newer(call: ModelCall) -> ModelOutcome:
        return outcomes.pop() if outcomes else Finished()

    outside.answer = newer
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    await session.deliver("dlv_2")

    await session.consumed("dlv_1", "dlv_1", "dlv_2")
    assert [attend.attention and attend.attention.code for attend in outside.attended] == ["UNREADABLE_STATE"]
    assert [call.at.turn for call in outside.model_calls] == [0, 0, 1]


@pytest.mark.parametrize("bench", ["inline"], indirect=True)
async def test_a_newer_build_replays_a_run_that_held_an_outcome_which_it_reads(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def newer(call: ModelCall) -> Any:
        return {"kind": "later"}

    outside.answer = newer
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    monkeypatch.setattr(versions, "OUTCOMES", {**versions.OUTCOMES, "later": "outcome-later"})
    later = TypeAdapter[Any](Annotated[Any, BeforeValidator(lambda _: Finished())])
    monkeypatch.setattr(turn, "_MODEL_OUTCOME", later)

    await a_replayer(SessionWorkflow, runner=UnsandboxedWorkflowRunner()).replay_workflow(
        await session.handle.fetch_history()
    )


@pytest.mark.parametrize("bench", ["inline"], indirect=True)
async def test_a_long_inline_turn_that_cannot_be_handed_over_yet_keeps_its_tokens(
    bench: Bench, outside: Outside
) -> None:
    async def answer(call: ModelCall) -> ModelOutcome:
        many = tuple(CallRef(call_id=f"c{number}", tool="act") for number in range(128))
        return Finished() if call.at.step else Calls(calls=many, parallel=32)

    async def act(call: ToolCall) -> ToolOutcome:
        token_hash = "later" if call.call.call_id == "c7" else None
        return ToolOutcome(call_id=call.call.call_id, status="completed", token_hash=token_hash, head=9)

    outside.answer, outside.act = answer, act
    session = await bench.start(outside)
    other = await bench.client.start_workflow(
        names.TURN_WORKFLOW, {}, id=names.turn_workflow(session.handle.id, 0), task_queue="nobody"
    )
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))
    state = await session.handle.query(names.DESCRIBE)

    await other.terminate()
    await session.handle.signal(names.REPAIR, {"how": "retry"})

    await outside.until(lambda: len(outside.model_calls) == 2)
    assert state["tokenHash"] == "later"
    # More than one, if it was due again before it was repaired.
    assert {attend.attention and attend.attention.code for attend in outside.attended} == {"TURN_RUNS_ALREADY"}
    assert (len(outside.tool_calls), [call.at.step for call in outside.model_calls]) == (128, [0, 1])


async def test_only_news_has_a_held_turn_tried_again(bench: Bench, outside: Outside) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside, tries=9)
    await session.deliver("dlv_1")
    await described(session, lambda state: bool(state["held"]))
    serving.gone = False

    # Whether it was emitted before is unknown.
    for _ in range(3):
        await session.deliver("dlv_1")
    state = await session.handle.query(names.DESCRIBE)
    assert (state["held"] is not None, state["inTurn"], outside.model_calls) == (True, [], [])

    await session.deliver("dlv_2")
    await session.consumed("dlv_1", "dlv_2")


async def test_a_held_turn_continues_by_itself(bench: Bench, outside: Outside) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    serving.gone = False

    await session.consumed("dlv_1")


async def test_an_operator_can_have_a_held_turn_tried_again(bench: Bench, outside: Outside) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside, tries=9)
    await session.deliver("dlv_1")
    await described(session, lambda state: bool(state["held"]))

    serving.gone = False
    await session.handle.signal(names.REPAIR, {"how": "retry"})

    await session.consumed("dlv_1")


async def test_a_turn_that_is_held_in_its_second_step_continues_there(bench: Bench, outside: Outside) -> None:
    serving = Serving()

    async def answer(call: ModelCall) -> ModelOutcome:
        if call.at.step == 0:
            return Calls(calls=(CallRef(call_id="a", tool="a"),), head=7)
        return await serving(call)

    outside.answer = answer
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    serving.gone = False

    await outside.until(lambda: len(outside.model_calls) == 2)
    assert [(call.at.turn, call.at.step, call.head) for call in outside.model_calls] == [(0, 0, None), (0, 1, 7)]
    assert len(outside.tool_calls) == 1


async def test_a_held_turn_can_be_cancelled(bench: Bench, outside: Outside) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside, tries=9)
    await session.deliver("dlv_1")
    await described(session, lambda state: bool(state["held"]))

    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})

    await outside.until(lambda: bool(outside.concluded))
    assert [(made.kind, made.at.turn) for made in outside.concluded] == [("cancelled", 0)]
    assert [each.id for each in outside.concluded[0].deliveries] == ["dlv_1"]
    serving.gone = False
    await session.deliver("dlv_2")
    await session.consumed("dlv_2")


async def test_a_state_from_the_future_is_kept_with_all_that_comes_in(bench: Bench, outside: Outside) -> None:
    future = {"version": 999, "sessionId": "x", "wisdom": 3, "inbox": [{"id": "dlv_0"}]}
    session = await bench.start(outside, data=future)
    await outside.until(lambda: bool(outside.attended))
    await session.deliver("dlv_1")

    await session.handle.signal(names.REPAIR, {"how": "retry"})

    await outside.until(lambda: len(outside.attended) == 2)
    assert {attend.attention and attend.attention.code for attend in outside.attended} == {"UNREADABLE_STATE"}
    assert (outside.model_calls, outside.concluded) == ([], [])
    newest = bench.client.get_workflow_handle(session.handle.id)
    first = (await newest.fetch_history()).events[0].workflow_execution_started_event_attributes
    [data] = await bench.client.data_converter.decode(first.input.payloads)
    ref = DeliveryRef(id="dlv_1", token_hash="now")
    assert data == {**future, "inbox": [{"id": "dlv_0"}, ref.model_dump(mode="json")], "wasUnreadable": True}


async def test_an_unreadable_state_can_be_rebuilt(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, data={"version": 999})
    await outside.until(lambda: bool(outside.attended))
    outside.rebuilds = SessionState(session_id=session.handle.id, agent="demo", token_hash="now", turn=7).model_dump(
        mode="json"
    )

    await session.handle.signal(names.REPAIR, {"how": "rebuild"})
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")
    assert outside.model_calls[0].at.turn == 7


async def test_an_operator_can_end_a_session(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, data={"version": 999})

    await session.handle.signal(names.REPAIR, {"how": "fail"})

    assert await ended(session) == WorkflowExecutionStatus.COMPLETED
    assert [close.failure.code for close in outside.closed] == ["SESSION_FAILED"]


async def test_an_operators_cancellation_of_the_workflow_stops_the_turn_and_ends_the_session(
    bench: Bench, outside: Outside
) -> None:
    begun = asyncio.Event()

    async def hang(call: ModelCall) -> ModelOutcome:
        begun.set()
        await asyncio.Event().wait()
        return Finished()

    outside.answer = hang
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await asyncio.wait_for(begun.wait(), PATIENCE)

    await session.handle.cancel()

    assert await ended(session) == WorkflowExecutionStatus.CANCELED
    assert [made.kind for made in outside.concluded] == ["cancelled"]
    assert [close.failure.code for close in outside.closed] == ["SESSION_CANCELLED"]


async def test_an_operators_cancellation_of_a_parked_workflow_ends_the_session(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, open=(ASKED,))
    await session.parked()

    await session.handle.cancel()

    assert await ended(session) == WorkflowExecutionStatus.CANCELED
    assert [close.failure.code for close in outside.closed] == ["SESSION_CANCELLED"]


async def test_a_driver_can_be_started_from_the_store(bench: Bench, outside: Outside) -> None:
    outside.rebuilds = SessionState(
        session_id=f"ses_{uuid.uuid4().hex}",
        agent="demo",
        token_hash="now",
        turn=3,
        inbox=(DeliveryRef(id="dlv_1", token_hash="now"),),
    ).model_dump(mode="json")

    await bench.start(outside, agent="", token_hash="", rebuild=Rebuild(reason="WORKFLOW_LOST"))

    await outside.until(lambda: bool(outside.model_calls))
    assert (outside.consumed, outside.model_calls[0].at.turn) == (["dlv_1"], 3)
    assert [order.reason for order in outside.rebuilt] == ["WORKFLOW_LOST"]


async def test_a_driver_of_an_ended_session_ends(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, agent="", token_hash="", rebuild=Rebuild(reason="WORKFLOW_LOST"))

    assert await ended(session) == WorkflowExecutionStatus.COMPLETED


async def test_a_terminated_session_is_ended_by_the_driver_that_follows(bench: Bench, outside: Outside) -> None:
    outside.rebuilds = SessionState(session_id="x", agent="demo", token_hash="now").model_dump(mode="json")
    ends = Failure(code="SESSION_TERMINATED", message="Terminated.", structural=True)

    session = await bench.start(outside, agent="", token_hash="", rebuild=Rebuild(reason="x", ends=ends))

    assert await ended(session) == WorkflowExecutionStatus.COMPLETED
    assert [close.failure.code for close in outside.closed] == ["SESSION_TERMINATED"]


async def test_a_cancel_that_comes_while_a_reminder_is_written_is_not_forgotten(bench: Bench, outside: Outside) -> None:
    reminding, may = asyncio.Event(), asyncio.Event()

    async def before_reminding() -> None:
        reminding.set()
        await may.wait()

    outside.before[names.REMIND] = before_reminding
    session = await bench.start(outside, open=(OpenInput(request_id="inp_1", remind_at=(1.0,)),))
    await asyncio.wait_for(reminding.wait(), PATIENCE)

    await session.handle.signal(names.CANCEL, {})
    may.set()

    await outside.until(lambda: bool(outside.withdrawals))


async def test_an_activity_that_fails_for_good_does_not_fail_the_driver(bench: Bench, outside: Outside) -> None:
    """A worker of another build may call it impossible."""
    outside.concluding_fails = [ApplicationError("unreadable", type="UNREADABLE_STATE", non_retryable=True)]
    waiting = (DeliveryRef(id="dlv_1", token_hash="now"),)
    session = await bench.start(outside, cancel="this", inbox=waiting)

    await outside.until(lambda: bool(outside.concluded), within=2 * PATIENCE)
    assert await status(session) == WorkflowExecutionStatus.RUNNING


async def test_a_withdrawal_that_fails_for_good_does_not_fail_the_driver(bench: Bench, outside: Outside) -> None:
    async def fail() -> None:
        outside.before.pop(names.WITHDRAW_INPUTS)
        raise ApplicationError("unreadable", type="UNREADABLE_STATE", non_retryable=True)

    outside.before[names.WITHDRAW_INPUTS] = fail
    session = await bench.start(outside, cancel="this", open=(ASKED,))

    await outside.until(lambda: bool(outside.withdrawals), within=2 * PATIENCE)
    assert await status(session) == WorkflowExecutionStatus.RUNNING


async def test_a_parked_driver_continues_as_new_before_its_history_is_long(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside, open=(ASKED,))
    first = (await session.handle.describe()).run_id
    sent: list[str] = []

    async with asyncio.timeout(2 * PATIENCE):
        while (await bench.client.get_workflow_handle(session.handle.id).describe()).run_id == first:
            sent.append(f"dlv_{len(sent)}")
            await session.deliver(sent[-1], coalesce=True)
    newest = Driven(bench.client, bench.client.get_workflow_handle(session.handle.id), outside)
    await newest.deliver("ans", kind="answer")
    await outside.until(lambda: len(outside.resumptions) == 1)
    assert outside.resumptions[0].open == (ASKED,)
    await newest.consumed("ans", *sent)


async def test_a_turn_that_parks_while_it_is_held_back_keeps_its_requests(bench: Bench, outside: Outside) -> None:
    outside.answer = serving = Serving()
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await outside.until(lambda: bool(outside.attended))

    async def parks(call: ModelCall) -> ModelOutcome:
        return Parked(open=(ASKED,))

    outside.answer = parks
    await session.handle.signal(names.REPAIR, {"how": "retry"})

    await session.parked()
    assert serving.gone


class _SlowToConclude(Outside):
    def __init__(self) -> None:
        super().__init__()
        self.concluding = asyncio.Event()
        self.may = asyncio.Event()

    @activity.defn(name=names.CONCLUDE_TURN)
    async def conclude_turn(self, conclusion: Conclusion) -> None:
        self.concluding.set()
        await self.may.wait()
        await self._note(self.concluded, conclusion)


async def test_a_cancel_that_meets_the_end_of_a_failed_turn_changes_nothing(temporal_server: TemporalServer) -> None:
    bench, outside = Bench(await temporal_client(Settings(temporal_address=temporal_server.address))), _SlowToConclude()

    async def fails(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 0:
            raise ApplicationError("no", {}, type="MODEL_CALL_FAILED", non_retryable=True)
        return Finished()

    outside.answer = fails
    async with bench.working(outside):
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await asyncio.wait_for(outside.concluding.wait(), PATIENCE)

        await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
        await session.deliver("dlv_2")
        outside.may.set()

        await session.consumed("dlv_2")
    assert [made.kind for made in outside.concluded] == ["failed"]
    assert outside.attended == []


# A turn is given half a minute to stop.
@pytest.mark.slow
async def test_an_operator_can_end_a_session_whose_turn_has_no_worker(temporal_server: TemporalServer) -> None:
    bench, outside = Bench(await temporal_client(Settings(temporal_address=temporal_server.address))), Outside()
    asked = asyncio.Event()

    async def hangs(call: ModelCall) -> ModelOutcome:
        asked.set()
        await asyncio.Event().wait()
        return Finished()

    outside.answer = hangs
    async with bench.working(outside) as parts:
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await asyncio.wait_for(asked.wait(), PATIENCE)
        await parts.stop_turns()

        await session.handle.signal(names.REPAIR, {"how": "fail"})

        await outside.until(lambda: bool(outside.closed), within=2 * PATIENCE)
