"""The steps of a turn, executed as activities; and from Temporal's errors to the failures that readers see."""

import asyncio
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    TerminatedError,
    TimeoutError,
    is_cancelled_exception,
)

from perdure.errors import PerdureError, TurnCancelled, UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import Bounds
from perdure.protocol.requests import (
    Concluded,
    Conclusion,
    Failure,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
)
from perdure.protocol.wire import JsonObject
from perdure.session.turn import StepFailed

from . import policies
from .policies import Policy

T = TypeVar("T")

_MODEL_OUTCOME: TypeAdapter[ModelOutcome] = TypeAdapter(ModelOutcome)
_TOOL_OUTCOME = TypeAdapter(ToolOutcome)
_RESUMED = TypeAdapter(Resumed)
_NOTHING: TypeAdapter[None] = TypeAdapter(None)

NONE_TYPE: Any = type(None)
#: Workers of older builds return None.
CONCLUDED_TYPE = cast("type[Concluded | None]", Concluded | None)


class ActivitySteps:
    """Implements `Steps`: each method executes one activity on the task queue of its kind."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        return await self._execute(
            names.CALL_MODEL,
            call,
            queue=names.MODELS_QUEUE,
            policy=policies.model(self._bounds) if self._bounds else policies.MODEL,
            summary=f"step {call.at.step}: {label or call.agent}",
            outcome=_MODEL_OUTCOME,
        )

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        return await self._execute(
            names.CALL_TOOL,
            call,
            queue=names.TOOLS_QUEUE,
            policy=policies.tool(call.call, self._bounds),
            summary=f"step {call.at.step}: {call.call.summary or call.call.tool}",
            outcome=_TOOL_OUTCOME,
        )

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        return await self._execute(
            names.RESUME_TURN, resumption, policy=policies.SHORT, summary="resume", outcome=_RESUMED
        )

    async def park(self, park: ParkTurn) -> None:
        waiting = f"park: {len(park.open)} open"
        await self._execute(names.PARK_TURN, park, policy=policies.SHORT, summary=waiting, outcome=_NOTHING)

    async def conclude(self, conclusion: Conclusion) -> Concluded | None:
        summary = f"{conclusion.kind}: {conclusion.failure.code}"
        concluding = asyncio.ensure_future(
            execute_until_done(names.CONCLUDE_TURN, conclusion, summary=summary, result=CONCLUDED_TYPE)
        )
        try:
            while True:
                try:
                    return await asyncio.shield(concluding)
                except asyncio.CancelledError:
                    # The end of a turn must be recorded, however often the turn is stopped. Older runs cancelled it.
                    if concluding.done() or not workflow.patched("conclude-to-the-end"):
                        concluding.cancel()
                        return await concluding
        except ActivityError as error:
            raise failure_of_activity(error) from error

    def parallel(self, limit: int | None, calls: int) -> int:
        if limit is not None or calls <= policies.PARALLEL:
            return limit or calls
        # Older workers send no limit, and older turns began all calls at once. Those with more calls than Temporal
        # allows to be open were stuck: from here on they begin some calls at a time.
        return policies.PARALLEL if workflow.patched("parallel-calls") else calls

    def should_continue_as_new(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    def is_stopping(self) -> bool:
        """Whether the turn was asked to stop."""
        return workflow.cancellation_reason() is not None

    def cancelled(self, *, early: bool = False) -> bool:
        if not self.is_stopping():
            return False
        # Turns that began before this check existed ran their calls here.
        return not early or workflow.patched("stop-before-calls")

    async def _execute(
        self,
        name: str,
        argument: Any,
        *,
        queue: str = names.MODELS_QUEUE,
        policy: Policy,
        summary: str,
        outcome: TypeAdapter[T],
    ) -> T:
        """Execute one activity; raises `StepFailed` when all attempts have failed."""
        try:
            result: Any = await workflow.execute_activity(
                name,
                argument,
                task_queue=names.sibling(workflow.info().task_queue, queue),
                start_to_close_timeout=policy.start_to_close,
                schedule_to_close_timeout=policy.schedule_to_close,
                heartbeat_timeout=policy.heartbeat,
                retry_policy=policy.retry,
                # A turn counts as stopped only after its activities have ended.
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=summary[:200],
            )
        except ActivityError as error:
            # An attempt whose worker died is not retried once its turn is cancelled: it ends as a time-out.
            if is_cancelled_exception(error) or self.is_stopping() or found_cancel(error):
                raise asyncio.CancelledError from error
            raise failure_of_activity(error) from error
        try:
            return outcome.validate_python(result)
        except ValidationError:
            # The activity ran on a newer build. What it did is recorded: the turn waits for a build that reads it.
            failure = Failure(code=UnreadableState.code, message="This build cannot read the outcome of a step.")
            raise StepFailed(failure, held=True) from None


async def execute_until_done(name: str, argument: Any, *, summary: str, result: type[T] = NONE_TYPE) -> T:
    """Execute an activity that must succeed in the end, however long the store is unavailable."""
    return await workflow.execute_activity(
        name,
        argument,
        task_queue=names.sibling(workflow.info().task_queue, names.MODELS_QUEUE),
        result_type=result,
        start_to_close_timeout=policies.UNTIL_DONE.start_to_close,
        heartbeat_timeout=policies.UNTIL_DONE.heartbeat,
        retry_policy=policies.UNTIL_DONE.retry,
        summary=summary,
    )


# --- failures ------------------------------------------------------------------------------------------------


def failure_of_activity(error: ActivityError) -> StepFailed:
    """The failure of a step after its last attempt."""
    match error.cause:
        case ApplicationError() as cause:
            return StepFailed(_of_application(cause), held=bool(_report(cause).get("held")))
        case TimeoutError():
            return StepFailed(Failure(code="STEP_TIMEOUT", message="The step did not end in time."))
        case _:
            return StepFailed(Failure(code="STEP_FAILED", message="The step could not be done."))


def found_cancel(error: ActivityError) -> bool:
    """Whether the step has found a cancel request for the turn."""
    return isinstance(error.cause, ApplicationError) and error.cause.type == TurnCancelled.code


def failure_of_turn(error: ChildWorkflowError) -> Failure:
    """The failure of a turn workflow that ended without a result."""
    match error.cause:
        case ApplicationError() as cause:
            return _of_application(cause)
        case TerminatedError():
            return Failure(code="TURN_TERMINATED", message="The turn was terminated by an operator.")
        case _:
            return Failure(code="TURN_FAILED", message="The turn could not be finished.")


def failure_of_error(error: PerdureError) -> Failure:
    """The failure of an inline turn that ended without a result."""
    if isinstance(error, StepFailed):
        return error.failure
    return Failure(code=error.code, message=error.bare()[0])


def _of_application(error: ApplicationError) -> Failure:
    report = _report(error)
    details: Any = report.get("details")
    return Failure(
        code=error.type or "STEP_FAILED",
        message=error.message,
        details=details or None,
        structural=bool(report.get("structural")),
    )


def _report(error: ApplicationError) -> JsonObject:
    return cast(JsonObject, error.details[0]) if error.details and isinstance(error.details[0], dict) else {}
