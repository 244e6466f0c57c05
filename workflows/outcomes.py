"""How activities end: those that must succeed in the end, and from Temporal's errors to failures that readers see."""

import asyncio
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    TerminatedError,
    TimeoutError,
    is_cancelled_exception,
)

from perdure.errors import PerdureError, TurnCancelled
from perdure.protocol import names
from perdure.protocol.actions import Park
from perdure.protocol.requests import CallBack, Concluded, Failure, TurnRequest, TurnResult
from perdure.protocol.wire import JsonObject
from perdure.session import decisions
from perdure.session.turn import StepFailed

from . import policies

T = TypeVar("T")

_RETRY_PAUSE = timedelta(seconds=10)

NONE_TYPE: Any = type(None)
#: Workers of older builds return None.
CONCLUDED_TYPE = cast("type[Concluded | None]", Concluded | None)


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


async def execute_until_success(name: str, argument: Any, *, summary: str, result: type[T] = NONE_TYPE) -> T:
    """The same, for a driver. One worker's non-retryable error is no verdict for all workers."""
    while not (done := await execute_or_pause(name, argument, summary=summary, result=result)):
        pass
    return done[0]


async def execute_or_pause(name: str, argument: Any, *, summary: str, result: type[T] = NONE_TYPE) -> tuple[T] | None:
    """The result. None after an error and a pause: until it is tried again, the driver may do something else."""
    try:
        return (await execute_until_done(name, argument, summary=summary, result=result),)
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise asyncio.CancelledError from error
        await workflow.sleep(_RETRY_PAUSE)
        return None


async def call_back_once(order: CallBack) -> None:
    """Deliver the callback of a session that has ended. A worker that dies in it is no reason to keep the workflow."""
    await workflow.execute_activity(
        names.CALL_BACK,
        order,
        task_queue=names.sibling(workflow.info().task_queue, names.MODELS_QUEUE),
        schedule_to_close_timeout=policies.CALL_BACK.schedule_to_close,
        start_to_close_timeout=policies.CALL_BACK.start_to_close,
        heartbeat_timeout=policies.CALL_BACK.heartbeat,
        retry_policy=policies.CALL_BACK.retry,
        summary="call back",
    )


async def conclude(
    request: TurnRequest, failure: Failure, kind: Literal["failed", "cancelled"] = "failed"
) -> TurnResult:
    """End a turn that no step could end; its result."""
    end = decisions.conclusion(request, request.step, failure, kind)
    concluded = await execute_until_success(
        names.CONCLUDE_TURN, end, summary=f"{kind}: {failure.code}", result=CONCLUDED_TYPE
    )
    open = concluded.open if concluded else ()
    return TurnResult(
        snapshot=request.snapshot,
        action=Park() if open else decisions.action_after_conclusion(request.mode, failure, concluded),
        open=open,
        token_hash=concluded.token_hash if concluded else None,
        head=concluded.head if concluded else None,
        failure=failure,
        cancelled=kind == "cancelled",
        silent=bool(concluded and concluded.silent),
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
