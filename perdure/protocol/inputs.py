"""What a session asks of people: approvals and questions."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from .wire import JsonObject, Versioned, Wire

InputKind: TypeAlias = Literal["approval", "question"]
Consequence: TypeAlias = Literal["deny", "approve", "fail"]
InputStatus: TypeAlias = Literal["open", "answered", "expired", "withdrawn"]

APPROVE = "approve"
DENY = "deny"

#: The fields of a request in the contract. Its schema is closed.
_CONTRACT = frozenset({"requestId", "prompt", "action", "display", "allowFreeform", "options"})


def digest(arguments: JsonObject) -> str:
    """A fingerprint of a call's arguments, the same however they are written down."""
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()


class Option(Wire):
    id: str
    label: str
    style: Literal["primary", "danger", "default"] | None = None


class Responders(Wire):
    """Who may answer. The requester is the principal that owns the session."""

    kind: Literal["requester", "anyone", "attribute", "principals"] = "requester"
    # `attribute`: this attribute of the principal must hold one of the values. `principals`: its address must be one.
    attribute: str | None = None
    values: tuple[str, ...] = ()
    # How many distinct principals must agree before it counts.
    quorum: int = 1


class InputRequest(Versioned):
    """One open question to people. Its id comes from session, turn and call, so asking twice is asking once."""

    request_id: str
    session_id: str
    agent: str
    turn: int
    step: int
    call_id: str
    tool: str
    kind: InputKind
    prompt: str
    # A readable account of what the call would do, when the tool supplies one.
    summary: str | None = None
    input: JsonObject
    # Of the arguments: what is approved is what is run.
    digest: str
    display: Literal["confirmation", "select", "text"]
    allow_freeform: bool = False
    options: tuple[Option, ...] = ()
    responders: Responders = Responders()
    # `once`: an approval is remembered under this key for the rest of the session.
    remember: str | None = None
    # ISO-8601, UTC.
    expires_at: str | None = None
    on_expiry: Consequence = "deny"

    def wire(self) -> JsonObject:
        """As `input.requested` shows it: exactly the fields of the contract, whose clients refuse any other."""
        shown: JsonObject = {
            "requestId": self.request_id,
            "prompt": self.prompt,
            "action": {"kind": "tool-call", "callId": self.call_id, "toolName": self.tool, "input": self.input},
            "display": self.display,
            "allowFreeform": self.allow_freeform,
        }
        if self.options:
            shown["options"] = [option.model_dump(mode="json", exclude_none=True) for option in self.options]
        return shown

    def more(self) -> JsonObject:
        """What the contract has no field for."""
        told: JsonObject = {
            "kind": self.kind,
            "responders": self.responders.model_dump(mode="json", exclude_none=True),
        }
        if self.summary is not None:
            told["summary"] = self.summary
        if self.expires_at is not None:
            told |= {"expiresAt": self.expires_at, "onExpiry": self.on_expiry}
        return told


def requested(requests: Sequence[InputRequest]) -> JsonObject:
    """The data of `input.requested`: the requests as the contract has them, and beside them what is ours."""
    return {
        "requests": [each.wire() for each in requests],
        "details": {each.request_id: each.more() for each in requests},
    }


def as_requested(data: JsonObject) -> JsonObject:
    """The same of an event that any build has written: older ones wrote our fields into the requests."""
    requests: list[JsonObject] = data.get("requests", [])
    if all(each.keys() <= _CONTRACT for each in requests):
        return data
    strict = [{name: value for name, value in each.items() if name in _CONTRACT} for each in requests]
    ours = {
        each["requestId"]: {name: value for name, value in each.items() if name not in _CONTRACT} for each in requests
    }
    return {**data, "requests": strict, "details": {**ours, **data.get("details", {})}}


class InputAnswer(Versioned):
    """What was answered, by whom."""

    # `approve`, `deny`, or the option of a question that was chosen.
    option_id: str | None = None
    text: str | None = None
    # An approval may change the arguments; they were validated before it counted.
    arguments: JsonObject | None = None
    digest: str | None = None
    reason: str | None = None
    principal_id: str | None = None
    # Whose answer it is: a service and a user may have one name. Votes of older builds do not say it.
    owner: str | None = None
    at: str | None = None

    @property
    def approves(self) -> bool:
        return self.option_id == APPROVE

    def same_principal(self, other: "InputAnswer") -> bool:
        """Whether one and the same has given both, as far as is known."""
        if self.owner is None or other.owner is None:
            return self.principal_id == other.principal_id
        return self.owner == other.owner

    def same(self, other: "InputAnswer") -> bool:
        """Whether both say the same, whoever said it."""
        return (self.option_id, self.text) == (other.option_id, other.text) and self._arguments == other._arguments

    @property
    def _arguments(self) -> str | None:
        # As they are written: to Python 1, 1.0 and true are equal, to a tool they are not.
        return None if self.arguments is None else digest(self.arguments)

    def wire(self) -> dict[str, Any]:
        return {name: value for name, value in self.shown().items() if name != "arguments"}

    def shown(self) -> dict[str, Any]:
        """As whoever may see the request sees it."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"version", "owner"})


class OpenInput(Wire):
    """An open request as Temporal carries it: an id, and when to look at it again. Seconds since the epoch."""

    request_id: str
    expires_at: float | None = None
    remind_at: tuple[float, ...] = ()
