"""Outcomes of tool calls, as they are recorded and shown to readers and to the model."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from perdure.bounds import DEEPEST, deeper_than, described, whole
from perdure.errors import DeadlineExceeded, Invalid
from perdure.harness.journal import TurnJournal
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptEnd, error_of

from .records import Outcome, RequestedCall

FAILED = "ACTION_RESULT_FAILED"
UNKNOWN = "TOOL_OUTCOME_UNKNOWN"
APPROVAL_UNAVAILABLE = "TOOL_APPROVAL_UNAVAILABLE"
DENIED = "TOOL_EXECUTION_DENIED"
TURN_CANCELLED = "TURN_CANCELLED"
TOO_MANY = "TOOL_CALL_LIMIT_REACHED"
SKIPPED = "TOOL_CALL_SKIPPED"
DEADLINE = DeadlineExceeded.code


def completed(result: Any, largest: int) -> Outcome:
    """The outcome of a tool that returned."""
    try:
        # This blocks the event loop, so a result that is too large is encoded once and not decoded.
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
    # The result is data, even if it looks like an error: the status is a field of its own.
    return Outcome(status="completed", output=output)


def failed(message: str, code: str = FAILED, status: str = "failed") -> Outcome:
    """The outcome of a call that failed or was not executed."""
    text = whole(message)
    return Outcome.model_validate(
        {"status": status, "output": text, "is_error": True, "error": {"code": code, "message": text}}
    )


def too_many(most: int) -> Outcome:
    """The outcome of a call beyond the limit of its step."""
    message = f"This call was not executed: one step may make at most {most} calls. Make it in a later step."
    return failed(message, TOO_MANY)


def made_by(turn: TurnJournal, step: int, call_id: str) -> tuple[tuple[str, str], ...]:
    """The tools that a program has called, and the status of each call."""
    return tuple((call.tool, _become_of(turn, step, call)) for call in turn.calls_of(step, call_id))


def _become_of(turn: TurnJournal, step: int, call: RequestedCall) -> str:
    if outcome := turn.outcome(step, call.call_id):
        return outcome.status
    return "unknown" if call.child or turn.interrupted(step, call.call_id) else "not executed"


#: The most calls of a program that are named in its failure.
_MOST_NAMED = 30


def of_program(problem: str, made: Sequence[tuple[str, str]]) -> str:
    """Why a program has failed, and what has become of its calls: the model does not see them otherwise."""
    if not made:
        return f"{problem}\nIt had made no calls."
    named = [f"{number}. {tool}: {status}" for number, (tool, status) in enumerate(made[:_MOST_NAMED], 1)]
    more = [f"… and {len(made) - _MOST_NAMED} more"] if len(made) > _MOST_NAMED else []
    return "\n".join([problem, "Its calls before that, and what has become of them:", *named, *more])


def skipped() -> Outcome:
    """The outcome of a call that had not begun when a message entered its turn."""
    return failed("Skipped: the user said something else.", SKIPPED, "rejected")


def end_of(outcome: Outcome) -> tuple[AttemptEnd, JsonObject | None]:
    """How the attempt has ended that records this outcome, for its report."""
    if not outcome.is_error:
        return "succeeded", None
    error = outcome.error or {}
    return "failed", error_of(str(error.get("code", FAILED)), str(error.get("message", "")))


def denied(reason: str | None = None) -> Outcome:
    """The outcome of a call that was denied."""
    return _denied(f"Tool execution was denied. Reason: {reason}" if reason else "Tool execution was denied.")


def ignored() -> Outcome:
    """The outcome of a call whose request was closed by a message that did not answer it."""
    return _denied("Ignored because the user continued without responding.")


def _denied(message: str) -> Outcome:
    error = {"code": DENIED, "message": message}
    return Outcome(status="rejected", output=error, is_error=True, error=error)


def cut(text: str, largest: int) -> str:
    """The text cut to this many bytes, with a note if something is missing."""
    encoded = text.encode()
    return text if len(encoded) <= largest else _cut(encoded, largest)


def as_text(output: Any) -> str:
    """The output as text; what is no text, as JSON."""
    return output if isinstance(output, str) else to_json(output, inf_nan_mode="strings").decode()


def _cut(encoded: bytes, largest: int) -> str:
    kept = encoded[:largest].decode(errors="ignore")
    return f"{kept}… [output cut: {len(kept.encode())} of {len(encoded)} bytes kept]"
