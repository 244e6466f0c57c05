"""The calls that a model or a program requests: as they are recorded, with their outcomes, and as readers see them.

The records of a turn that hold them are read by `perdure.harness.journal`.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast

from perdure.bounds import shortened
from perdure.protocol import names
from perdure.protocol.inputs import InputRequest, OpenInput
from perdure.protocol.requests import CallRef
from perdure.protocol.wire import JsonObject, Wire

_SECRET = ("token", "password", "secret", "key", "credential", "authorization")
_SHORT = 40
_LONGEST = 160

OutcomeStatus: TypeAlias = Literal["completed", "failed", "rejected", "unknown"]


class Ask(Wire):
    """The input request of a call that waits for people. Times are seconds since the epoch."""

    request: InputRequest
    expires_at: float | None = None
    remind_at: tuple[float, ...] = ()

    @property
    def open(self) -> OpenInput:
        return OpenInput(request_id=self.request.request_id, expires_at=self.expires_at, remind_at=self.remind_at)


class ChildCall(Wire):
    """A call that is the work of another session."""

    # The agent of that session, and where the contract's clients find it: `__root__` for a copy of the caller.
    agent: str
    node_id: str
    description: str = ""
    depth: int
    # The address of the server, if it is an agent elsewhere.
    remote_url: str | None = None
    # When the turn that has begun it fails, if a program made the call: it may be a later turn than that of the reply.
    deadline: float | None = None


class RequestedCall(Wire):
    """A call that the model has requested.

    Without `ref` it does not run in this session; with `ask` it waits for people, with `child` for another session.
    """

    call_id: str
    tool: str
    input: JsonObject
    ref: CallRef | None = None
    ask: Ask | None = None
    child: ChildCall | None = None
    # Whether the call is a program, which makes calls of its own.
    program: bool = False

    @property
    def runs(self) -> bool:
        """Whether the call runs without an answer from people."""
        return self.ref is not None and self.ask is None

    @property
    def key(self) -> str:
        """The key of the action of a call that is the work of another session."""
        return names.action_of_child(self.tool, self.call_id)


class Result(Wire):
    """A structured result that fits its schema."""

    value: Any


class StoredStage(Wire):
    """The calls with which a program waits, and its state there."""

    # Calls that cannot run have their outcomes already.
    calls: tuple[RequestedCall, ...]
    # Of the calls as the program made them: a repeated run is compared with them.
    digests: tuple[str, ...]
    # None: the program runs from its beginning again.
    state: str | None = None
    # The version of the interpreter that can load it.
    engine: str = ""
    printed: str = ""
    parallel: int | None = None


class Intent(Wire):
    """The record of an attempt that is about to run the tool."""

    tool: str
    attempt: int
    generation: int


class Outcome(Wire):
    """The outcome of a call."""

    status: OutcomeStatus
    output: Any = None
    is_error: bool = False
    error: JsonObject | None = None
    token_hash: str | None = None


def summary(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> str:
    """The call in one line. Arguments that are secrets by their name or schema are hidden."""
    declared = (schema or {}).get("properties", {})
    shown = ", ".join(f"{name}={_shown(name, value, declared.get(name))}" for name, value in arguments.items())
    return shortened(f"{tool}({shown})", _LONGEST)


def _is_secret(declared: Any) -> bool:
    """Whether the schema is that of a `SecretStr`, alone or in a union."""
    if not isinstance(declared, Mapping):
        return False
    known = cast("Mapping[str, Any]", declared)
    return known.get("format") == "password" or any(_is_secret(each) for each in known.get("anyOf", ()))


def _shown(name: str, value: Any, declared: Any) -> str:
    if any(word in name.lower() for word in _SECRET) or _is_secret(declared):
        return "•••"
    # Nested values may hold secrets, so only their size is shown.
    if isinstance(value, dict | list):
        return f"{{{len(value)}}}" if isinstance(value, dict) else f"[{len(value)}]"  # pyright: ignore[reportUnknownArgumentType]
    return shortened(json.dumps(value, ensure_ascii=False), _SHORT)


def action_of(call: RequestedCall) -> JsonObject:
    """The call as an action of the contract."""
    if call.child is None:
        return {"kind": "tool-call", "callId": call.call_id, "toolName": call.tool, "input": call.input}
    is_remote = call.child.remote_url is not None
    return {
        "kind": "remote-agent-call" if is_remote else "subagent-call",
        "callId": call.call_id,
        "name": call.tool,
        "nodeId": call.child.node_id,
        "remoteAgentName" if is_remote else "subagentName": call.tool,
        "description": call.child.description,
        "input": call.input,
    }
