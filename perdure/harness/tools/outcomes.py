"""From what a tool returned to what is recorded, told and shown to the model."""

from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from perdure.errors import Invalid
from perdure.harness.journal import Outcome
from perdure.protocol.wire import DEEPEST, deeper_than
from perdure.text import described, whole

FAILED = "ACTION_RESULT_FAILED"
UNKNOWN = "TOOL_OUTCOME_UNKNOWN"
REJECTED = "TOOL_APPROVAL_UNAVAILABLE"
DENIED = "TOOL_EXECUTION_DENIED"
TURN_CANCELLED = "TURN_CANCELLED"
TOO_MANY = "TOOL_CALL_LIMIT_REACHED"


def completed(result: Any, largest: int) -> Outcome:
    """The outcome of a tool that returned."""
    try:
        # Nobody else is served meanwhile, so what is not kept anyway is written once and never read again.
        text = type(result) is str
        encoded = result.encode() if text else to_json(result, inf_nan_mode="strings", bytes_mode="base64")
        if len(encoded) > largest:
            return Outcome(status="completed", output=_cut(encoded, largest))
        output = result if text else from_json(encoded)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        problem = described(error)
        raise Invalid(f"The tool returned a {type(result).__name__} that cannot be sent as JSON: {problem}") from None
    if deeper_than(output, DEEPEST):
        raise Invalid(f"The tool returned a {type(result).__name__} that is nested deeper than {DEEPEST} levels.")
    # What it returned is data, whatever it looks like: how the call went stands beside it.
    return Outcome(status="completed", output=output)


def failed(message: str, code: str = FAILED, status: str = "failed") -> Outcome:
    """The outcome of a tool that did not."""
    text = whole(message)
    return Outcome.model_validate(
        {"status": status, "output": text, "is_error": True, "error": {"code": code, "message": text}}
    )


def too_many(most: int) -> Outcome:
    """The outcome of a call beyond those that one step may make."""
    message = f"This call was not executed: one step may make at most {most} calls. Make it in a later step."
    return failed(message, TOO_MANY)


def denied(reason: str | None = None) -> Outcome:
    """The outcome of a call that somebody has said no to."""
    return _denied(f"Tool execution was denied. Reason: {reason}" if reason else "Tool execution was denied.")


def ignored() -> Outcome:
    """The outcome of a call that nobody has answered, because they said something else."""
    return _denied("Ignored because the user continued without responding.")


def _denied(message: str) -> Outcome:
    told = {"code": DENIED, "message": message}
    return Outcome(status="rejected", output=told, is_error=True, error=told)


def cut(text: str, largest: int) -> str:
    """At most so many bytes of it, and an honest note when that is not all."""
    encoded = text.encode()
    return text if len(encoded) <= largest else _cut(encoded, largest)


def _cut(encoded: bytes, largest: int) -> str:
    kept = encoded[:largest].decode(errors="ignore")
    return f"{kept}… [output cut: {len(kept.encode())} of {len(encoded)} bytes kept]"
