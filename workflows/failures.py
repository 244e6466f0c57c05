"""From Temporal's errors to the failures that readers of a session see."""

from typing import Any, cast

from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError, TerminatedError, TimeoutError

from perdure.errors import TurnCancelled
from perdure.protocol.requests import Failure
from perdure.protocol.wire import JsonObject
from perdure.session.turn import StepFailed


def of_activity(error: ActivityError) -> StepFailed:
    """The failure of a step after its last attempt."""
    match error.cause:
        case ApplicationError() as cause:
            return StepFailed(_of_application(cause), held=bool(_report(cause).get("held")))
        case TimeoutError():
            return StepFailed(Failure(code="STEP_TIMEOUT", message="The step did not end in time."))
        case _:
            return StepFailed(Failure(code="STEP_FAILED", message="The step could not be done."))


def is_cancelled(error: ActivityError) -> bool:
    """Whether the step has found a cancel request for the turn."""
    return isinstance(error.cause, ApplicationError) and error.cause.type == TurnCancelled.code


def of_turn(error: ChildWorkflowError) -> Failure:
    """The failure of a turn workflow that ended without a result."""
    match error.cause:
        case ApplicationError() as cause:
            return _of_application(cause)
        case TerminatedError():
            return Failure(code="TURN_TERMINATED", message="The turn was terminated by an operator.")
        case _:
            return Failure(code="TURN_FAILED", message="The turn could not be finished.")


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
