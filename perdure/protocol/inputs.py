"""Input requests and their answers: approvals and questions."""

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

#: The fields that the contract allows in a request; clients refuse any other.
_CONTRACT = frozenset({"requestId", "prompt", "action", "display", "allowFreeform", "options"})


def digest(arguments: JsonObject) -> str:
    """A hash of a call's arguments that does not depend on how their JSON is written."""
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()


class Option(Wire):
    id: str
    label: str
    style: Literal["primary", "danger", "default"] | None = None


class Responders(Wire):
    """Who may answer. The requester is the principal that owns the session."""

    kind: Literal["requester", "anyone", "attribute", "principals"] = "requester"
    # `attribute`: this attribute of the principal must contain one of the values. `principals`: its address must.
    attribute: str | None = None
    values: tuple[str, ...] = ()
    # How many distinct principals must give the same answer before it counts.
    quorum: int = 1


class InputRequest(Versioned):
    """One approval or question. Its id is derived from session, turn and call, so a retry creates no second request."""

    request_id: str
    session_id: str
    agent: str
    turn: int
    step: int
    call_id: str
    tool: str
    kind: InputKind
    prompt: str
    # What the call would do, in words, when the tool supplies them.
    summary: str | None = None
    input: JsonObject
    # Of the arguments: only the approved arguments may run.
    digest: str
    display: Literal["confirmation", "select", "text"]
    allow_freeform: bool = False
    options: tuple[Option, ...] = ()
    responders: Responders = Responders()
    # `once`: the key under which an approval is stored for the rest of the session.
    remember: str | None = None
    # ISO-8601, UTC.
    expires_at: str | None = None
    on_expiry: Consequence = "deny"

    def wire(self) -> JsonObject:
        """The request in `input.requested`: exactly the fields of the contract. Its clients refuse any other."""
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

    def details(self) -> JsonObject:
        """Perdure's own fields of the request."""
        fields: JsonObject = {
            "kind": self.kind,
            "responders": self.responders.model_dump(mode="json", exclude_none=True),
        }
        if self.summary is not None:
            fields["summary"] = self.summary
        if self.expires_at is not None:
            fields |= {"expiresAt": self.expires_at, "onExpiry": self.on_expiry}
        return fields


def requested(requests: Sequence[InputRequest]) -> JsonObject:
    """The data of `input.requested`: the requests of the contract, and Perdure's own fields in `details`."""
    return {
        "requests": [each.wire() for each in requests],
        "details": {each.request_id: each.details() for each in requests},
    }


def as_requested(data: JsonObject) -> JsonObject:
    """The data of a stored event in the same form: older builds wrote Perdure's own fields into the requests."""
    requests: list[JsonObject] = data.get("requests", [])
    if all(each.keys() <= _CONTRACT for each in requests):
        return data
    strict = [{name: value for name, value in each.items() if name in _CONTRACT} for each in requests]
    details = {
        each["requestId"]: {name: value for name, value in each.items() if name not in _CONTRACT} for each in requests
    }
    return {**data, "requests": strict, "details": {**details, **data.get("details", {})}}


class InputAnswer(Versioned, extra="allow"):
    """One answer to an input request, with its principal.

    Fields of newer builds are kept: an older one stores the answer again when it counts another vote.
    """

    # `approve`, `deny`, or the option of a question that was chosen.
    option_id: str | None = None
    text: str | None = None
    # An approval may change the arguments; they were validated before it counted.
    arguments: JsonObject | None = None
    digest: str | None = None
    reason: str | None = None
    principal_id: str | None = None
    # The principal's owner key: a service and a user may have the same name. Votes of older builds do not have it.
    owner: str | None = None
    at: str | None = None

    @property
    def approves(self) -> bool:
        return self.option_id == APPROVE

    def same_principal(self, other: "InputAnswer") -> bool:
        """Whether one principal gave both answers, as far as is known."""
        if self.owner is None or other.owner is None:
            return self.principal_id == other.principal_id
        return self.owner == other.owner

    def same(self, other: "InputAnswer") -> bool:
        """Whether both answers have the same content. The principals may differ."""
        return (self.option_id, self.text) == (other.option_id, other.text) and self._arguments == other._arguments

    @property
    def _arguments(self) -> str | None:
        # Compared as JSON text: for Python 1, 1.0 and true are equal, for a tool they are not.
        return None if self.arguments is None else digest(self.arguments)

    def wire(self) -> dict[str, Any]:
        return {name: value for name, value in self.shown().items() if name != "arguments"}

    def shown(self) -> dict[str, Any]:
        """The answer as every caller that may see the request sees it."""
        shown = set(InputAnswer.model_fields) - {"version", "owner"}
        return self.model_dump(mode="json", exclude_none=True, include=shown)


class OpenInput(Wire, extra="allow"):
    """An open request as Temporal carries it: an id and its timers, in seconds since the epoch.

    Drivers pass it on with fields of newer builds that they do not know.
    """

    request_id: str
    expires_at: float | None = None
    remind_at: tuple[float, ...] = ()
    # The turn and the step of the event that has shown it first. None: an older build has opened it.
    first_shown: tuple[int, int] | None = None
