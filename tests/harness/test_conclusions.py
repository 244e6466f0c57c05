"""A turn is ended by something else than its steps, while other things happen to its session."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from perdure import tool
from perdure.errors import SessionGone, UnreadableState
from perdure.protocol.actions import Park
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    Attention,
    CallRef,
    Calls,
    CloseSession,
    Concluded,
    Conclusion,
    Coordinates,
    Failure,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Refusal,
    Reminder,
    Snapshot,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
    Withdrawal,
)
from perdure.session import decisions
from perdure.session.decisions import CANCELLED
from perdure.session.state import OPERATOR_FAILED, SessionState, load_session
from perdure.session.turn import StepFailed, run_turn
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.values import Commit, Committed
from perdure.telemetry import spans
from perdure.testing import call
from perdure.testing.stage import LocalSteps
from tests.support.lab import SESSION, YES, Lab, lab

from .test_tool_step import Effects, declared, dying
from .till import Till, asked

CRASHED = Failure(code="STEP_TIMEOUT", message="The step did not end in time.")


@tool
def act() -> str:
    return "done"


async def test_a_cancel_of_a_message_outlives_a_turn_before_it_that_emits_nothing() -> None:
    """Two answers come close together: the turn of the first carries out both, and the other one's is silent."""
    till = Till()
    async with asked(till, 1, 2, then=("Done.", "never")) as (it, model, open):
        first, second = await it.answer((open[0], YES)), await it.answer((open[1], YES))
        for approved in (await it.resume(first, open=open)).calls:
            await it.run_approved(approved)
        await it.model(first, turn=1)
        waiting = await it.deliver("Delete everything")
        request = await it.request_cancel()

        # The driver takes the second answer first, and knows of the cancel request.
        await it.cancel(second, turn=2)

        assert request is not None
        row = await it.store.session(SESSION)
        assert row is not None
        assert row.cancel_turn == request.turn == 2
        await it.conclude(CRASHED, waiting, turn=2)
        assert (await it.types())[-2:] == ["turn.cancelled", "session.waiting"]
        assert len(model.prompts) == 2


class _Meeting:
    """The store of a conclusion, while a worker is just about to run a call."""

    def __init__(self, store: Store, meet: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._meet: Callable[[], Awaitable[object]] | None = meet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        meet, self._meet = self._meet, None
        if meet is not None:
            await meet()
        return await self._store.commit(commit)


async def test_a_call_that_begins_while_its_turn_is_concluded_is_not_reported_as_not_executed() -> None:
    effects = Effects()
    effects.dies = 1
    async with lab([call("act")], declared(effects)) as it:
        delivery = await it.deliver("Go")
        (ref,) = await it.calls(delivery)
        store = cast(Store, _Meeting(it.store, lambda: dying(it, ref)))
        it.harness = it.worker(store)

        await it.conclude(CRASHED, delivery)

        assert len(effects.keys) == 1
        (emitted,) = await it.emitted("action.result")
        assert "may have happened" in emitted["result"]["output"]


class _Conflicting:
    """Steps of a turn whose tool wants a token that another session owns."""

    def __init__(self, it: Lab) -> None:
        self._it = it

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        return Calls(calls=(CallRef(call_id="c", tool="act"),))

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        raise StepFailed(Failure(code="TOKEN_CONFLICT", message="Taken.", structural=True))

    async def conclude(self, conclusion: Conclusion) -> Concluded:
        return await self._it.harness.conclude_turn(conclusion)

    def __getattr__(self, name: str) -> object:
        return getattr(self._it.harness, name)

    def parallel(self, limit: int | None, calls: int) -> int:
        return limit or calls

    def should_continue_as_new(self) -> bool:
        return False

    def cancelled(self, *, early: bool = False) -> bool:
        return False


async def test_driver_and_store_agree_whether_the_session_has_ended() -> None:
    """What would have ended the session met a cancel, which does not."""
    async with lab([call("act")], act) as it:
        delivery = await it.deliver("Go")
        await it.calls(delivery)
        await it.request_cancel()
        steps: LocalSteps = _Conflicting(it)  # type: ignore[assignment]

        request = TurnRequest(session_id=SESSION, turn=0, agent="tester", deliveries=(delivery,), holds=True)
        result = await run_turn(request, steps)

        assert isinstance(result, TurnResult)
        assert (result.action, await it.session_status()) == (Park(), "waiting")


async def test_a_turn_that_had_parked_before_it_was_concluded_keeps_its_requests() -> None:
    """The park is committed, and the workflow that should report it is terminated."""
    till = Till()
    async with asked(till, 5) as (it, _, open):
        at = Coordinates(session_id=SESSION, turn=0)

        concluded = await it.harness.conclude_turn(Conclusion(at=at, failure=CRASHED))

        assert concluded.open == open
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=concluded.open)
        assert [approved.call.tool for approved in resumed.calls] == ["pay"]


async def test_a_conclusion_does_not_make_the_driver_forget_how_far_the_session_had_come() -> None:
    """Also when the store is an older copy: only a rebuild accepts that."""
    async with lab(["One."]) as it:
        delivery = await it.deliver("Go")
        at = Coordinates(session_id=SESSION, turn=40)
        state = SessionState(session_id=SESSION, agent="tester", token_hash="t", turn=40, head=500)

        concluded = await it.harness.conclude_turn(
            Conclusion(kind="cancelled", at=at, failure=CANCELLED, deliveries=(delivery,))
        )
        state = state.after_turn(TurnResult(snapshot=Snapshot(), action=Park(), head=concluded.head))

        assert state.head == 500


async def test_attention_that_comes_after_the_turn_has_ended_is_not_set() -> None:
    async with lab([call("act")], act) as it:
        delivery = await it.deliver("Go")
        await it.calls(delivery)
        await it.conclude(CRASHED, delivery)

        await it.attend(Attention(code="AGENT_GONE", message="Gone."), turn=0)

        row = await it.store.session(SESSION)
        assert row is not None
        assert row.attention is None


async def test_attention_is_taken_back_when_the_state_can_be_read_again() -> None:
    async with lab(["One."]) as it:
        await it.model(await it.deliver("Go"))
        await it.attend(Attention(code="UNREADABLE_STATE", message="Future."))

        await it.attend(None)

        row = await it.store.session(SESSION)
        assert row is not None
        assert row.attention is None
        assert (await it.types())[-2:] == ["session.attention", "session.recovered"]


async def test_a_delivery_signalled_twice_while_the_state_was_unreadable_is_consumed_once() -> None:
    async with lab(["One."]) as it:
        delivery = (await it.deliver("Go")).model_copy(update={"coalesce": True})
        data = SessionState(session_id=SESSION, agent="tester", token_hash="first-token").model_dump(mode="json")

        state = load_session({**data, "inbox": [delivery.model_dump(mode="json")] * 2})
        move = decisions.next_move(state, 0.0)

        assert isinstance(move, decisions.RunTurn)
        assert move.deliveries == (delivery,)
        await it.model(delivery, delivery)
        assert (await it.types()).count("message.received") == 1


async def test_a_delivery_of_a_later_kind_is_left_to_a_build_that_reads_it_and_its_turn_can_be_cancelled() -> None:
    """A newer turn may ask an older worker; what it cannot read it must not take for a message."""
    async with lab(["One."]) as it:
        await it.deliver("Go")
        ref = DeliveryRef(id="dlv_later", kind="later", token_hash="")
        body = {"kind": "later", "message": "Go later"}
        await it.store.accept(NewDelivery(SESSION, ref.id, body, "owner", ref=ref.model_dump(mode="json")))

        with pytest.raises(UnreadableState):
            await it.model(ref)
        assert "turn.started" not in await it.types()

        await it.harness.conclude_turn(Conclusion(kind="cancelled", at=_AT, failure=CANCELLED, deliveries=(ref,)))
        assert (await it.types())[-2:] == ["turn.cancelled", "session.waiting"]


async def test_a_delivery_of_a_later_version_is_left_to_a_build_that_reads_it_and_its_turn_can_be_cancelled() -> None:
    async with lab(["One."]) as it:
        ref = await it.deliver("Go", version=2)

        with pytest.raises(UnreadableState, match="The delivery has version 2; this code reads versions 1 to 1"):
            await it.model(ref)
        assert "turn.started" not in await it.types()

        await it.harness.conclude_turn(Conclusion(kind="cancelled", at=_AT, failure=CANCELLED, deliveries=(ref,)))
        assert (await it.types())[-3:] == ["message.received", "turn.cancelled", "session.waiting"]


_AT = Coordinates(session_id=SESSION, turn=0)
_ASKED = (OpenInput(request_id="inp_1"),)
_ENDS: dict[str, Callable[[Lab], Awaitable[object]]] = {
    "conclude": lambda it: it.harness.conclude_turn(Conclusion(kind="cancelled", at=_AT, failure=CANCELLED)),
    "withdraw": lambda it: it.harness.withdraw_inputs(Withdrawal(at=_AT, open=_ASKED)),
    "refuse": lambda it: it.harness.refuse_delivery(
        Refusal(session_id=SESSION, delivery_id="d0", code="stale", message="Stale.")
    ),
    "close": lambda it: it.harness.close_session(CloseSession(session_id=SESSION, failure=OPERATOR_FAILED)),
    "attend": lambda it: it.attend(Attention(code="AGENT_GONE", message="Gone."), 0),
    "recover": lambda it: it.attend(None),
    "park": lambda it: it.harness.park_turn(ParkTurn(at=_AT, agent="tester", open=_ASKED)),
    "remind": lambda it: it.harness.remind(Reminder(session_id=SESSION, request_id="inp_1", left=0)),
}


@pytest.mark.parametrize("end", _ENDS.values(), ids=_ENDS)
async def test_a_worker_with_another_database_hands_the_end_of_a_turn_back(
    end: Callable[[Lab], Awaitable[object]],
) -> None:
    """What it called done would never be: in the right store the turn would run for ever."""
    async with lab([]) as elsewhere:
        with pytest.raises(SessionGone):
            await end(elsewhere)


async def test_the_attention_of_a_session_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(spans, "needs_attention", counted.append)

    async with lab(["One."]) as it:
        await it.model(await it.deliver("Go"))
        for _ in range(2):
            await it.attend(Attention(code="UNREADABLE_STATE", message="Future."))

    assert counted == ["UNREADABLE_STATE"]
