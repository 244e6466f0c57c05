"""The driver: one long-lived workflow per session."""

import contextlib
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.actions import (
    DispatchCodeModeRuntimeActions,
    DispatchRuntimeActions,
    Done,
    Park,
)
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import (
    Conclusion,
    Coordinates,
    Failure,
    Refusal,
    Reminder,
    TurnRequest,
    TurnResult,
    Withdrawal,
)
from perdure.protocol.wire import JsonObject
from perdure.session import decisions
from perdure.session.state import SessionState, load_session, read_delivery, read_turn
from perdure.session.turn import CANCELLED, conclusion

from . import failures
from .steps import conclude, note

TurnHandle: TypeAlias = "workflow.ChildWorkflowHandle[Any, TurnResult]"


@workflow.defn(name=names.SESSION_WORKFLOW)
class SessionWorkflow:
    """Hears deliveries in order, runs a turn for each, and waits in between at no cost."""

    @workflow.init
    def __init__(self, data: JsonObject) -> None:
        # Signals may come before `run` starts, so the state must be there first; and nothing here may raise.
        self._unreadable: UnreadableState | None = None
        try:
            self._state = load_session(data)
        except UnreadableState as unreadable:
            self._unreadable = unreadable
            self._state = SessionState(session_id=workflow.info().workflow_id, agent="", token_hash="")
        self._in_turn = False
        self._turn_handle: TurnHandle | None = None
        self._cancelling = False
        self._cancelling_next = False

    @workflow.signal(name=names.DELIVER)
    def deliver(self, *data: Any) -> None:
        # However many: a handler that is called with the wrong number of arguments fails the task, for ever.
        delivery = read_delivery(data[0]) if len(data) == 1 else None
        if delivery is None:
            # Nobody who was told "accepted" sends such a signal; it has no row in the store and no reader to tell.
            workflow.logger.warning("A signal of unknown shape was ignored")
            return
        self._state = self._state.hears(delivery)

    @workflow.signal(name=names.CANCEL)
    def cancel(self, *data: Any) -> None:
        """Stop the turn that runs or is about to run, or withdraw what it waits for. Idle: nothing to do."""
        if not (self._in_turn or self._state.open or self._state.inbox):
            return
        turn = read_turn(data[0] if data else None)
        if decisions.is_over(self._state, turn):
            # The signal was late: the turn that it meant has ended, and the next one is none of its business.
            return
        if self._in_turn and decisions.is_to_come(self._state, turn):
            # Or early: this turn ended before its readers' eyes, and only we have not heard of it yet.
            self._cancelling_next = True
            return
        self._cancelling = True
        if self._turn_handle is not None:
            self._turn_handle.cancel()

    @workflow.query(name=names.DESCRIBE)
    def describe(self) -> JsonObject:
        return self._state.model_dump(mode="json", exclude={"seen", "snapshot"})

    @workflow.run
    async def run(self, data: JsonObject) -> None:
        if self._unreadable is not None:
            await self._fail(self._unreadable)
            return
        while True:
            await self._stirred()
            if self._cancelling and self._state.open:
                await self._withdraw()
                if self._state.mode == "task":
                    # A task that was stopped has no next message.
                    return
                continue
            await self._refuse_stale()
            await self._remind()
            expired = decisions.expired(self._state, workflow.time())
            batch, self._state = decisions.next_batch(self._state)
            if not batch and not expired:
                # What was to be cancelled was refused, or is not there any more.
                self._cancelling = False
                continue
            result = await self._turn(batch, expired)
            self._state = self._state.after_turn(result)
            # A turn that was just parking when it was cancelled has not noticed: what it asked is withdrawn.
            self._cancelling = self._cancelling_next or (self._cancelling and bool(self._state.open))
            self._cancelling_next = False
            match result.action:
                case Done():
                    return
                case Park():
                    if not self._cancelling:
                        # What somebody wants stopped is not carried to the next run.
                        self._renew_if_due()
                case DispatchRuntimeActions() | DispatchCodeModeRuntimeActions():
                    # A turn that is newer than this driver asks for children. The task fails, and is tried again
                    # until a driver that knows how takes over: nothing is lost meanwhile.
                    raise RuntimeError(f"This driver cannot carry out {result.action.kind}")

    async def _stirred(self) -> None:
        """Wait for something to do: a delivery that can be heard, a cancellation, or a request whose time has come."""
        look = decisions.next_look(self._state)
        patience = None if look is None else timedelta(seconds=max(0.0, look - workflow.time()))
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._cancelling or decisions.can_go_on(self._state), timeout=patience
            )

    async def _turn(self, batch: tuple[DeliveryRef, ...], expired: tuple[str, ...]) -> TurnResult:
        state = self._state
        request = TurnRequest(
            session_id=state.session_id,
            turn=state.turn,
            agent=state.agent,
            model=state.model,
            mode=state.mode,
            capabilities=state.capabilities,
            snapshot=state.snapshot,
            deliveries=batch,
            open=state.open,
            expired=expired,
            traceparent=batch[-1].traceparent if batch else None,
        )
        if self._cancelling:
            # Stopped before it began: it does not begin, not even for a moment.
            return await self._conclude(request, CANCELLED, "cancelled")
        try:
            return await self._run_child(request)
        except ChildWorkflowError as error:
            if workflow.cancellation_reason() is not None:
                raise
            return await self._conclude(request, failures.of_turn(error))

    async def _run_child(self, request: TurnRequest) -> TurnResult:
        self._in_turn = True
        try:
            self._turn_handle = await workflow.start_child_workflow(
                names.TURN_WORKFLOW,
                request,
                id=names.turn_workflow(request.session_id, request.turn),
                task_queue=names.sibling(workflow.info().task_queue, names.TURNS_QUEUE),
                result_type=TurnResult,
                task_timeout=timedelta(seconds=names.DECISION_SECONDS),
                static_summary=" · ".join(filter(None, (f"turn {request.turn}", request.agent, request.model))),
            )
            if self._cancelling:
                self._turn_handle.cancel()
            return await self._turn_handle
        finally:
            self._in_turn = False
            self._turn_handle = None

    async def _conclude(
        self, request: TurnRequest, failure: Failure, kind: Literal["failed", "cancelled"] = "failed"
    ) -> TurnResult:
        await conclude(conclusion(request, request.step, failure, kind))
        return TurnResult(
            snapshot=request.snapshot,
            action=decisions.after_turn(request.mode, failure),
            failure=failure,
            cancelled=kind == "cancelled",
        )

    async def _withdraw(self) -> None:
        """The turn that waits is cancelled: nobody needs to answer any more."""
        state = self._state
        parked = Coordinates(session_id=state.session_id, turn=max(0, state.turn - 1))
        await note(
            names.WITHDRAW_INPUTS,
            Withdrawal(at=parked, mode=state.mode, open=state.open),
            summary=f"withdraw: {len(state.open)} open",
        )
        self._state = self._state.withdrawn()
        self._cancelling = False

    async def _remind(self) -> None:
        for request in decisions.reminders(self._state, workflow.time()):
            number = len(request.remind_at)
            reminder = Reminder(session_id=self._state.session_id, request_id=request.request_id, left=number - 1)
            await note(names.REMIND, reminder, summary="remind")
            self._state = self._state.reminded(request)

    async def _refuse_stale(self) -> None:
        """Answer what came with a token that is no longer the session's: with an event, never with silence."""
        stale, self._state = decisions.take_stale(self._state)
        for delivery in stale:
            refusal = Refusal(
                session_id=self._state.session_id,
                delivery_id=delivery.id,
                code="session_not_active",
                message="The continuation token was replaced before this delivery was read.",
            )
            await note(names.REFUSE_DELIVERY, refusal, summary="stale delivery")

    async def _fail(self, unreadable: UnreadableState) -> None:
        at = Coordinates(session_id=self._state.session_id, turn=self._state.turn)
        failure = Failure(code=unreadable.code, message=unreadable.message, structural=True)
        await conclude(Conclusion(at=at, failure=failure, deliveries=self._state.inbox))

    def _renew_if_due(self) -> None:
        """Go on in a fresh run. Only between turns: a running child would be terminated with its parent's run."""
        info = workflow.info()
        if info.is_continue_as_new_suggested():
            workflow.continue_as_new(self._state.model_dump(mode="json"))
        if info.is_target_worker_deployment_version_changed():
            workflow.continue_as_new(
                self._state.model_dump(mode="json"),
                initial_versioning_behavior=workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE,
            )
