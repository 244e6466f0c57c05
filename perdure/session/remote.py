"""Calls that agents on other servers do: what is known of them, the tokens of their callbacks, and their results."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, cast

from perdure.bounds import DEEPEST, deeper_than, repaired, whole
from perdure.protocol.wire import JsonObject, Versioned, Wire

FAILED = "REMOTE_AGENT_FAILED"
START_FAILED = "REMOTE_AGENT_START_FAILED"
#: The code of the contract for what another server reports as failed.
SESSION_FAILED = "SESSION_FAILED"

#: The header with which a server says how many sessions are above the one that it starts elsewhere.
DEPTH_HEADER = "x-perdure-depth"
#: Deeper than any limit.
_DEEPEST = 1_000

_LONGEST_CODE, _LONGEST_MESSAGE = 200, 2_000


class RemoteState(Versioned, extra="allow"):
    """How far a call is. Times are seconds since the epoch. Fields of newer builds are kept."""

    # The call, as the other server gets it.
    call_id: str
    name: str
    # Whether the other server can report the end, so that its stream is read rarely.
    calls_back: bool = False
    # When the task counts as failed.
    ends_at: float
    # Attempts to start it; the id of the session that was started.
    tries: int = 0
    session_id: str | None = None
    # When there is something to do next.
    due: float = 0.0
    # How often its stream was read, without anything new, and without an answer that helps.
    polls: int = 0
    misses: int = 0
    # How much of its stream was read, and what that says of the result.
    next: int = 0
    text: str | None = None
    result: JsonObject | None = None
    # When it was to be stopped.
    stop_at: float | None = None

    def after_end(self) -> JsonObject:
        """What is kept of a call that has ended: no content."""
        return self.model_copy(update={"text": None, "result": None}).model_dump(mode="json")


class Progress(Wire):
    """What a piece of a stream says."""

    state: RemoteState
    # The result of the task, if it has ended.
    ended: JsonObject | None = None


def progress(state: RemoteState, events: list[JsonObject]) -> Progress:
    """The state after these events of the other session."""
    known: dict[str, Any] = {}
    ended: JsonObject | None = None
    for event in events:
        known["next"] = known.get("next", state.next) + 1
        data = cast("JsonObject", event["data"]) if isinstance(event.get("data"), dict) else {}
        match event.get("type"):
            case "message.completed" if isinstance(data.get("message"), str):
                known["text"] = whole(data["message"])
            case "result.completed" if "result" in data and deeper_than(data["result"], DEEPEST):
                ended = failure(FAILED, "The other server has sent a result that is nested too deep.")
            case "result.completed" if "result" in data:
                known["result"] = {"value": repaired(data["result"])}
            case "session.completed":
                result, text = known.get("result", state.result), known.get("text", state.text)
                ended = {"output": result["value"] if result is not None else text or ""}
            case "session.failed":
                ended = {"error": _error(data, SESSION_FAILED)}
            case _:
                pass
        if ended is not None:
            break
    return Progress(state=state.model_copy(update=known), ended=ended)


def reported(fields: Mapping[str, Any]) -> JsonObject:
    """The result that a callback brings."""
    if fields.get("kind") == "session.completed":
        return {"output": fields.get("output", "")}
    error = fields.get("error")
    known: Mapping[str, Any] = cast("Mapping[str, Any]", error) if isinstance(error, Mapping) else {}
    return {"error": _error(known, FAILED)}


def failure(code: str, message: str) -> JsonObject:
    return {"error": {"code": code, "message": message}}


def _error(given: Mapping[str, Any], code: str) -> JsonObject:
    said, message = given.get("code"), given.get("message")
    if code == SESSION_FAILED or not (isinstance(said, str) and said):
        said = code
    text = message if isinstance(message, str) and message else "Remote agent failed."
    return {"code": whole(said[:_LONGEST_CODE]), "message": whole(text[:_LONGEST_MESSAGE])}


def derive_callback_token(secret: bytes, place: str) -> str:
    """The token of a call's callback. It cannot be guessed without the secret; a repeated start gets the same one."""
    return "cb_" + hmac.new(secret, b"callback-token/" + place.encode(), hashlib.sha256).hexdigest()


def hash_callback_token(token: str) -> str:
    """The raw token is a secret: the store sees its hash only."""
    return hashlib.sha256(b"perdure/callback/" + token.encode(errors="surrogatepass")).hexdigest()


def read_depth(text: str | None) -> int:
    """How many sessions are above one that another server starts here, as it says."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= len(str(_DEEPEST))):
        return 0
    return min(int(text), _DEEPEST)
