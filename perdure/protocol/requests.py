"""What Temporal carries between workflows and activities: references and small values, never content."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .actions import Action
from .deliveries import Capabilities, DeliveryRef, Mode
from .events import Usage
from .inputs import OpenInput
from .wire import JsonObject, Versioned, Wire

#: What stands for a failure's message where content must not go.
TOLD = "The session's events say what has happened."


class Snapshot(Versioned):
    """The turn's own state as it travels. The driver passes it on without reading it."""

    data: JsonObject = Field(default_factory=dict)


class Coordinates(Wire):
    """Where in a session something happens."""

    session_id: str
    turn: int
    step: int = 0


class Failure(Wire):
    """Why a step, a turn or a session failed, as a reader may see it."""

    code: str
    message: str
    details: JsonObject | None = None
    structural: bool = False

    def bare(self) -> "Failure":
        """As Temporal carries it, once readers have been told the rest."""
        known = self.details or {}
        details = {"errorId": known["errorId"]} if "errorId" in known else None
        return Failure(code=self.code, message=TOLD, details=details, structural=self.structural)


class ModelCall(Versioned):
    """Input of `call_model`."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    # Only the first step of a turn hears deliveries.
    deliveries: tuple[DeliveryRef, ...] = ()
    # How many events the session had when this was asked for; a store that has fewer is older than the session.
    head: int | None = None


class CallRef(Wire):
    """A tool call that the model asked for; its arguments stay in the store."""

    call_id: str
    tool: str
    # For the Temporal UI; empty when UI detail is off.
    summary: str = ""
    timeout: float = 300.0
    heartbeat: float = 5.0
    attempts: int = 4


class Calls(Wire):
    """The model asks for tools."""

    kind: Literal["calls"] = "calls"
    calls: tuple[CallRef, ...]
    # How many of them run at the same time. None: the step was recorded before there was a limit.
    parallel: int | None = None
    # Calls that wait for people; the turn parks on them when the others have ended.
    open: tuple[OpenInput, ...] = ()
    usage: Usage = Usage()
    # Who answered, for the Temporal UI.
    model: str | None = None
    # How many events the session has now, as far as this step knows.
    head: int | None = None


class Parked(Wire):
    """All that the model asks for waits for people, and the readers have been told."""

    kind: Literal["parked"] = "parked"
    open: tuple[OpenInput, ...]
    usage: Usage = Usage()
    # Who answered, for the Temporal UI.
    model: str | None = None
    head: int | None = None


class Finished(Wire):
    """The turn ended with this step, well or with a failure that is already told to readers."""

    kind: Literal["finished"] = "finished"
    usage: Usage = Usage()
    # Who answered, for the Temporal UI.
    model: str | None = None
    failure: Failure | None = None
    head: int | None = None


class Unheard(Wire):
    """None of the deliveries was left to hear; nothing was written."""

    kind: Literal["unheard"] = "unheard"


ModelOutcome: TypeAlias = Annotated[Calls | Parked | Finished | Unheard, Field(discriminator="kind")]


class ResumeTurn(Versioned):
    """Input of `resume_turn`: what people said, or that they said nothing in time."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    deliveries: tuple[DeliveryRef, ...] = ()
    # Requests whose time was up when the turn was started.
    expired: tuple[str, ...] = ()
    # All that was open when the turn was started.
    open: tuple[OpenInput, ...] = ()
    head: int | None = None


class ApprovedCall(Wire):
    """A call that may run now. It belongs to the step that asked for it."""

    at: Coordinates
    call: CallRef


class Resumed(Wire):
    """What the answers came to."""

    calls: tuple[ApprovedCall, ...] = ()
    # As for `Calls`.
    parallel: int | None = None
    # What still waits for people; the model is not asked before nothing does.
    open: tuple[OpenInput, ...] = ()
    # The turn has ended with this, and the readers have been told.
    failure: Failure | None = None
    # An earlier turn has heard it all: readers are told nothing of this one.
    silent: bool = False


class ParkTurn(Versioned):
    """Input of `park_turn`: the turn ends here and waits for people."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    open: tuple[OpenInput, ...]


class Reminder(Versioned):
    """Input of `remind`."""

    session_id: str
    request_id: str
    # How many reminders of this request will follow.
    left: int


class ToolCall(Versioned):
    """Input of `call_tool`."""

    # The step that asked for it: there its records stand.
    at: Coordinates
    # The turn that runs it, when that is a later one: there its result is told.
    told_at: Coordinates | None = None
    agent: str
    call: CallRef


class ToolOutcome(Wire):
    """The call has an outcome in the store; this is its label."""

    call_id: str
    status: Literal["completed", "failed", "rejected", "unknown"]
    # Set when the tool gave the session another continuation token.
    token_hash: str | None = None
    # How many events the session had once that was recorded: outcomes come in any order, and the last token counts.
    head: int | None = None


class Conclusion(Versioned):
    """Input of `conclude_turn`: an end that no step could tell by itself."""

    kind: Literal["failed", "cancelled"] = "failed"
    at: Coordinates
    mode: Mode = "conversation"
    failure: Failure
    deliveries: tuple[DeliveryRef, ...] = ()


class Concluded(Wire):
    """What a conclusion found and left."""

    # The session's token as the store has it; None when the session owns none any more.
    token_hash: str | None = None
    head: int | None = None
    # Readers were told nothing of this turn.
    silent: bool = False
    # Whether the session is over now. None: whoever concluded does not report it.
    over: bool | None = None
    # The turn had parked before it was concluded: what still waits for people.
    open: tuple[OpenInput, ...] = ()


class Attention(Wire):
    """Why a session cannot go on by itself."""

    code: str
    message: str


class AttendSession(Versioned):
    """Input of `attend_session`: readers and operators are told that the session needs attention."""

    session_id: str
    # None: the session can go on again.
    attention: Attention | None = None
    # The turn that cannot go on; once it has ended, this comes too late.
    turn: int | None = None


class CloseSession(Versioned):
    """Input of `close_session`: an operator has ended the session."""

    session_id: str
    failure: Failure


class RebuildSession(Versioned):
    """Input of `rebuild_session`: the driver's state is derived from the store again."""

    session_id: str
    # Told to readers.
    reason: str


class Withdrawal(Versioned):
    """Input of `withdraw_inputs`: a parked turn was cancelled, and nobody needs to answer any more."""

    at: Coordinates
    mode: Mode = "conversation"
    open: tuple[OpenInput, ...]


class Refusal(Versioned):
    """Input of `refuse_delivery`: an accepted delivery that no turn will hear."""

    session_id: str
    delivery_id: str
    code: str
    message: str


class TurnRequest(Versioned):
    """Input of the turn workflow."""

    session_id: str
    turn: int
    agent: str
    # The model that answered last, for the Temporal UI.
    model: str | None = None
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    snapshot: Snapshot = Snapshot()
    deliveries: tuple[DeliveryRef, ...] = ()
    # What waits for people, and which of it has waited too long.
    open: tuple[OpenInput, ...] = ()
    expired: tuple[str, ...] = ()
    # Where a turn that continued as new goes on.
    step: int = 0
    token_hash: str | None = None
    retired: tuple[str, ...] = ()
    traceparent: str | None = None
    # How many events the session had when the driver last knew.
    head: int | None = None
    # Whether the driver starts a turn again that could not go on (`TurnResult.held`). Older ones do not.
    holds: bool = False


class TurnResult(Versioned):
    """What a turn leaves to its driver."""

    snapshot: Snapshot
    action: Action
    # The session's token as this turn left it; None when it did not change.
    token_hash: str | None = None
    # Those that it replaced: what was accepted with one of them may still be on its way.
    retired: tuple[str, ...] = ()
    failure: Failure | None = None
    model: str | None = None
    # What waits for people now.
    open: tuple[OpenInput, ...] = ()
    cancelled: bool = False
    # Readers were told nothing of this turn.
    silent: bool = False
    # The turn could not go on, for the reason in `failure`: the driver starts it again, with this request.
    # As JSON, because a driver may be older than the turn, and must not lose what it does not know.
    held: JsonObject | None = None
    head: int | None = None
