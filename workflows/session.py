"""The driver: one long-lived workflow per session."""

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ChildWorkflowError, is_cancelled_exception

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.actions import (
    DispatchCodeModeRuntimeActions,
    DispatchRuntimeActions,
    Done,
    Park,
)
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Conclusion, Coordinates, Failure, Refusal, TurnRequest, TurnResult
from perdure.protocol.wire import JsonObject
from perdure.session import decisions
from perdure.session.state import SessionState, load_session, read_delivery

from . import failures, policies
from .steps import conclude


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

    @workflow.signal(name=names.DELIVER)
    def deliver(self, data: Any) -> None:
        delivery = read_delivery(data)
        if delivery is None:
            # Nobody who was told "accepted" sends such a signal; it has no row in the store and no reader to tell.
            workflow.logger.warning("A signal of unknown shape was ignored")
            return
        self._state = self._state.hears(delivery)

    @workflow.query(name=names.DESCRIBE)
    def describe(self) -> JsonObject:
        return self._state.model_dump(mode="json", exclude={"seen", "snapshot"})

    @workflow.run
    async def run(self, data: JsonObject) -> None:
        if self._unreadable is not None:
            await self._fail(self._unreadable)
            return
        while True:
            await workflow.wait_condition(lambda: bool(self._state.inbox))
            await self._refuse_stale()
            batch, self._state = decisions.next_batch(self._state)
            if not batch:
                continue
            result = await self._turn(batch)
            self._state = self._state.after_turn(result)
            match result.action:
                case Done():
                    return
                case Park():
                    self._renew_if_due()
                case DispatchRuntimeActions() | DispatchCodeModeRuntimeActions():
                    # A turn that is newer than this driver asks for children. The task fails, and is tried again
                    # until a driver that knows how takes over: nothing is lost meanwhile.
                    raise RuntimeError(f"This driver cannot carry out {result.action.kind}")

    async def _turn(self, batch: tuple[DeliveryRef, ...]) -> TurnResult:
        state = self._state
        request = TurnRequest(
            session_id=state.session_id,
            turn=state.turn,
            agent=state.agent,
            mode=state.mode,
            capabilities=state.capabilities,
            snapshot=state.snapshot,
            deliveries=batch,
            traceparent=batch[-1].traceparent,
        )
        try:
            return await workflow.execute_child_workflow(
                names.TURN_WORKFLOW,
                request,
                id=names.turn_workflow(state.session_id, state.turn),
                task_queue=names.sibling(workflow.info().task_queue, names.TURNS_QUEUE),
                result_type=TurnResult,
                static_summary=f"turn {state.turn} · {state.agent}",
            )
        except ChildWorkflowError as error:
            if is_cancelled_exception(error):
                raise
            return await self._conclude(request, failures.of_turn(error))

    async def _conclude(self, request: TurnRequest, failure: Failure) -> TurnResult:
        await conclude(
            Conclusion(
                at=Coordinates(session_id=request.session_id, turn=request.turn, step=request.step),
                mode=request.mode,
                failure=failure,
                deliveries=request.deliveries,
            )
        )
        return TurnResult(
            snapshot=request.snapshot, action=decisions.after_turn(request.mode, failure), failure=failure
        )

    async def _refuse_stale(self) -> None:
        """Answer what came with a token that is no longer the session's: with an event, never with silence."""
        stale, self._state = decisions.take_stale(self._state)
        for delivery in stale:
            await workflow.execute_activity(
                names.REFUSE_DELIVERY,
                Refusal(
                    session_id=self._state.session_id,
                    delivery_id=delivery.id,
                    code="session_not_active",
                    message="The continuation token was replaced before this delivery was read.",
                ),
                task_queue=names.sibling(workflow.info().task_queue, names.MODELS_QUEUE),
                start_to_close_timeout=policies.LAST_WORD.start_to_close,
                retry_policy=policies.LAST_WORD.retry,
                summary="stale delivery",
            )

    async def _fail(self, unreadable: UnreadableState) -> None:
        at = Coordinates(session_id=self._state.session_id, turn=self._state.turn)
        failure = Failure(code=unreadable.code, message=unreadable.message, structural=True)
        try:
            await conclude(Conclusion(at=at, failure=failure, deliveries=self._state.inbox))
        except ActivityError:
            workflow.logger.error("The failure of an unreadable session could not be told")
            raise

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
