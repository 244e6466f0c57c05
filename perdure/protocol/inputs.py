"""What a session asks of people: approvals and questions."""

import hashlib
import json
from typing import Any, Literal, TypeAlias

from .wire import JsonObject, Versioned, Wire

InputKind: TypeAlias = Literal["approval", "question"]
Consequence: TypeAlias = Literal["deny", "approve", "fail"]
InputStatus: TypeAlias = Literal["open", "answered", "expired", "withdrawn"]

APPROVE = "approve"
DENY = "deny"


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
    # `attribute`: this attribute of the principal must hold one of the values. `principals`: its id must be one.
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
        """As `input.requested` shows it; the fields beyond the contract are ignored by clients that know it alone."""
        shown: JsonObject = {
            "requestId": self.request_id,
            "prompt": self.prompt,
            "action": {"kind": "tool-call", "callId": self.call_id, "toolName": self.tool, "input": self.input},
            "display": self.display,
            "allowFreeform": self.allow_freeform,
            "kind": self.kind,
            "responders": self.responders.model_dump(mode="json", exclude_none=True),
        }
        if self.options:
            shown["options"] = [option.model_dump(mode="json", exclude_none=True) for option in self.options]
        if self.summary is not None:
            shown["summary"] = self.summary
        if self.expires_at is not None:
            shown |= {"expiresAt": self.expires_at, "onExpiry": self.on_expiry}
        return shown


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
    at: str | None = None

    @property
    def approves(self) -> bool:
        return self.option_id == APPROVE

    def same(self, other: "InputAnswer") -> bool:
        """Whether both say the same, whoever said it."""
        return (self.option_id, self.text, self.arguments) == (other.option_id, other.text, other.arguments)

    def wire(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"version", "arguments"})


class OpenInput(Wire):
    """An open request as Temporal carries it: an id, and when to look at it again. Seconds since the epoch."""

    request_id: str
    expires_at: float | None = None
    remind_at: tuple[float, ...] = ()
