"""From what a tool returned to what is recorded, told and shown to the model."""

from typing import Any, cast

from pydantic_core import PydanticSerializationError, from_json, to_json

from perdure.errors import Invalid

from .journal import Outcome

FAILED = "ACTION_RESULT_FAILED"
UNKNOWN = "TOOL_OUTCOME_UNKNOWN"
REJECTED = "TOOL_APPROVAL_UNAVAILABLE"
DENIED = "TOOL_EXECUTION_DENIED"
CANCELLED = "TURN_CANCELLED"


def completed(result: Any, largest: int) -> Outcome:
    """The outcome of a tool that returned."""
    try:
        output = _plain(result)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise Invalid(f"The tool returned a {type(result).__name__} that cannot be sent as JSON: {error}") from None
    error = _error_in(output)
    return Outcome(status="failed" if error else "completed", output=cut(output, largest), error=error)


def failed(message: str, code: str = FAILED, status: str = "failed") -> Outcome:
    """The outcome of a tool that did not."""
    # Halves of characters do occur in messages about broken text, and no reader takes them.
    text = message.encode("utf-8", "replace").decode()
    return Outcome.model_validate(
        {"status": status, "output": text, "is_error": True, "error": {"code": code, "message": text}}
    )


def denied(reason: str | None = None) -> Outcome:
    """The outcome of a call that somebody has said no to."""
    return _denied(f"Tool execution was denied. Reason: {reason}" if reason else "Tool execution was denied.")


def ignored() -> Outcome:
    """The outcome of a call that nobody has answered, because they said something else."""
    return _denied("Ignored because the user continued without responding.")


def _denied(message: str) -> Outcome:
    told = {"code": DENIED, "message": message}
    return Outcome(status="rejected", output=told, is_error=True, error=told)


def cut(output: Any, largest: int) -> Any:
    """At most so many bytes of it, and an honest note when that is not all."""
    encoded = output.encode() if isinstance(output, str) else to_json(output)
    if len(encoded) <= largest:
        return output
    kept = encoded[:largest].decode(errors="ignore")
    return f"{kept}… [output cut: {len(kept.encode())} of {len(encoded)} bytes kept]"


def _plain(result: Any) -> Any:
    return from_json(to_json(result, inf_nan_mode="strings", bytes_mode="base64"))


def _error_in(output: Any) -> dict[str, str] | None:
    """A tool may also say that it failed by returning `{code, message}`."""
    if not isinstance(output, dict):
        return None
    told = cast("dict[str, Any]", output)
    code, message = told.get("code"), told.get("message")
    if isinstance(code, str) and code and isinstance(message, str) and message:
        return {"code": code, "message": message}
    return None
