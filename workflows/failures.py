"""What an engine error means to the readers of a session."""

from typing import Any, cast

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    TerminatedError,
    TimeoutError,
)

from perdure.protocol.requests import Failure
from perdure.protocol.wire import JsonObject


def of_activity(error: ActivityError) -> Failure:
    """The failure of a step whose attempts are all spent."""
    match error.cause:
        case ApplicationError() as cause:
            return _of_application(cause)
        case TimeoutError():
            return Failure(code="STEP_TIMEOUT", message="The step did not end in time.")
        case _:
            return Failure(code="STEP_FAILED", message="The step could not be done.")


def of_turn(error: ChildWorkflowError) -> Failure:
    """The failure of a turn that could not report one itself."""
    match error.cause:
        case ApplicationError() as cause:
            return _of_application(cause)
        case TerminatedError():
            return Failure(code="TURN_TERMINATED", message="The turn was terminated by an operator.")
        case _:
            return Failure(code="TURN_FAILED", message="The turn could not be finished.")


def _of_application(error: ApplicationError) -> Failure:
    report = cast(JsonObject, error.details[0]) if error.details and isinstance(error.details[0], dict) else {}
    details: Any = report.get("details")
    return Failure(
        code=error.type or "STEP_FAILED",
        message=error.message,
        details=details or None,
        structural=bool(report.get("structural")),
    )
