"""Values between workflows and activities, through Temporal: references and small values, never content."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .actions import Action
from .deliveries import Bounds, Capabilities, DeliveryRef, Mode
from .events import Usage
from .inputs import OpenInput
from .wire import JsonObject, Versioned, Wire

#: Replaces a failure's message where content is not allowed.
SEE_EVENTS = "The session's events say what has happened."


class Snapshot(Versioned):
    """The turn's own state. The driver passes it on without reading it."""

    data: JsonObject = Field(default_factory=dict)


class Coordinates(Wire):
    """Where in a session something happens."""

    session_id: str
    turn: int
    step: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.turn, self.step


class Failure(Wire):
    """Why a step, a turn or a session failed, as a reader may see it."""

    code: str
    message: str
    details: JsonObject | None = None
    structural: bool = False

    def bare(self) -> "Failure":
        """The failure without content, for Temporal. An event has the full text already."""
        known = self.details or {}
        details = {"errorId": known["errorId"]} if "errorId" in known else None
        return Failure(code=self.code, message=SEE_EVENTS, details=details, structural=self.structural)


class ModelCall(Versioned):
    """Input of `call_model`."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    # Only the first step of a turn reads deliveries.
    deliveries: tuple[DeliveryRef, ...] = ()
    # How many events the session had when this was requested; a store with fewer is older than the session.
    head: int | None = None


class CallRef(Wire, extra="allow"):
    """A tool call that the model requested; its arguments stay in the store.

    A driver passes it on to `call_tool`, with fields of newer builds that it does not know.
    """

    call_id: str
    tool: str
    # For the Temporal UI; empty when UI detail is off.
    summary: str = ""
    timeout: float = 300.0
    heartbeat: float = 5.0
    attempts: int = 4
    # The workers that run it, if not all do.
    pool: str | None = None
    # The key of the record that has the call, if a program made it.
    stage: str | None = None


class _Requested(Wire):
    calls: tuple[CallRef, ...]
    # How many of them run at the same time. None: the step was recorded before there was a limit.
    parallel: int | None = None
    # Input requests of gated calls; the turn parks on them when the other calls have ended.
    open: tuple[OpenInput, ...] = ()
    usage: Usage = Usage()
    # The model that replied, for the Temporal UI.
    model: str | None = None
    # How many events the session has now, as far as this step knows.
    head: int | None = None
    # How the agent's next turns run: "inline", or as child workflows.
    turns: str | None = None
    # The deliveries that have entered the turn at this step.
    joined: tuple[str, ...] = ()


class Calls(_Requested):
    """The model requested tool calls."""

    kind: Literal["calls"] = "calls"


class Delegated(_Requested):
    """The model requested calls, and some of them are the work of other sessions: the turn waits for their results."""

    kind: Literal["delegated"] = "delegated"
    # The keys of these actions.
    keys: tuple[str, ...]
    # When the turn fails, in seconds since the epoch.
    deadline: float | None = None


class Programs(_Requested):
    """The model requested calls, and some of them are programs: they make calls of their own until they end."""

    kind: Literal["programs"] = "programs"
    programs: tuple[CallRef, ...]


class Parked(Wire):
    """Every requested call waits for an answer; the events are emitted."""

    kind: Literal["parked"] = "parked"
    open: tuple[OpenInput, ...]
    usage: Usage = Usage()
    # The model that replied, for the Temporal UI.
    model: str | None = None
    head: int | None = None
    turns: str | None = None
    joined: tuple[str, ...] = ()


class Finished(Wire):
    """The turn ended with this step, completed or failed; the events are emitted."""

    kind: Literal["finished"] = "finished"
    usage: Usage = Usage()
    # The model that replied, for the Temporal UI.
    model: str | None = None
    failure: Failure | None = None
    head: int | None = None
    turns: str | None = None
    joined: tuple[str, ...] = ()


class NothingToRead(Wire):
    """No delivery was left to read, or the one that was is no message. The turn does not count."""

    kind: Literal["unheard"] = "unheard"
    # The session has ended.
    over: bool = False


ModelOutcome: TypeAlias = Annotated[
    Calls | Delegated | Programs | Parked | Finished | NothingToRead, Field(discriminator="kind")
]


class ResumeTurn(Versioned):
    """Input of `resume_turn`: deliveries with answers, and requests that expired."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    deliveries: tuple[DeliveryRef, ...] = ()
    # Requests that had expired when the turn was started.
    expired: tuple[str, ...] = ()
    # All requests that were open when the turn was started.
    open: tuple[OpenInput, ...] = ()
    head: int | None = None


class ApprovedCall(Wire):
    """A call that may run now. It belongs to the step that requested it."""

    at: Coordinates
    call: CallRef


class Resumed(Wire):
    """The effect of the answers."""

    # Set if there are programs: a turn of an older build leaves them to a newer one.
    kind: Literal["programs"] | None = None
    calls: tuple[ApprovedCall, ...] = ()
    # Programs that have not ended. They go on once their calls have results.
    programs: tuple[ApprovedCall, ...] = ()
    # As for `Calls`.
    parallel: int | None = None
    # Requests that are still open; the model is called only when there are none.
    open: tuple[OpenInput, ...] = ()
    # Set when the turn has ended with this failure; the events are emitted.
    failure: Failure | None = None
    # An earlier turn has read all deliveries: this one emits no events.
    silent: bool = False


class ParkTurn(Versioned):
    """Input of `park_turn`: the turn ends here and waits for answers."""

    at: Coordinates
    agent: str
    mode: Mode = "conversation"
    open: tuple[OpenInput, ...]
    # The steps with programs whose calls wait for people.
    programs: tuple[Coordinates, ...] = ()


class Reminder(Versioned):
    """Input of `remind`."""

    session_id: str
    request_id: str
    # How many reminders of this request will follow.
    left: int


class ToolCall(Versioned):
    """Input of `call_tool`."""

    # The step that requested it: its records have the coordinates of that step.
    at: Coordinates
    # The turn that runs it, if it is a later one: the event of its result belongs to that turn.
    told_at: Coordinates | None = None
    agent: str
    call: CallRef


class ToolOutcome(Wire):
    """The call has an outcome in the store; this is its status."""

    call_id: str
    status: Literal["completed", "failed", "rejected", "unknown"]
    # Set when the tool gave the session another continuation token.
    token_hash: str | None = None
    # How many events the session had then. Outcomes arrive in any order, and the token with the greatest head counts.
    head: int | None = None


class ProgramOutcome(Wire):
    """How far a program has come."""

    call_id: str
    # The program has an outcome in the store.
    ended: bool = False
    # What it waits for, as far as there are no results: calls, answers of people, and the keys of other sessions' work.
    calls: tuple[CallRef, ...] = ()
    parallel: int | None = None
    open: tuple[OpenInput, ...] = ()
    keys: tuple[str, ...] = ()
    # When the turn fails, in seconds since the epoch.
    deadline: float | None = None


class Conclusion(Versioned):
    """Input of `conclude_turn`: an end of the turn that no step could write."""

    kind: Literal["failed", "cancelled"] = "failed"
    at: Coordinates
    mode: Mode = "conversation"
    failure: Failure
    deliveries: tuple[DeliveryRef, ...] = ()


class Concluded(Wire):
    """The state of the session after a conclusion."""

    # The session's token as the store has it; None when the session owns none any more.
    token_hash: str | None = None
    head: int | None = None
    # The turn emitted no events.
    silent: bool = False
    # Whether the session has ended. None: the worker that concluded does not report it.
    over: bool | None = None
    # The requests that are still open, when the turn had parked before it was concluded.
    open: tuple[OpenInput, ...] = ()


class Attention(Wire):
    """Why a session cannot continue by itself."""

    code: str
    message: str


class AttendSession(Versioned):
    """Input of `attend_session`: record and emit that the session needs attention, or has recovered."""

    session_id: str
    # None: the session can continue again.
    attention: Attention | None = None
    # The turn that cannot continue. If it has ended meanwhile, nothing is written.
    turn: int | None = None


class CloseSession(Versioned):
    """Input of `close_session`: an operator ends the session, or a bound of time does."""

    session_id: str
    failure: Failure
    # Close it only if no delivery waits; the activity returns False otherwise.
    if_idle: bool = False


class RebuildSession(Versioned):
    """Input of `rebuild_session`: the driver's state is derived from the store again."""

    session_id: str
    # Shown in the event.
    reason: str


class Withdrawal(Versioned):
    """Input of `withdraw_inputs`: a parked turn was cancelled, and its requests need no answer."""

    at: Coordinates
    mode: Mode = "conversation"
    open: tuple[OpenInput, ...]


class Refusal(Versioned):
    """Input of `refuse_delivery`: an accepted delivery that no turn will read."""

    session_id: str
    delivery_id: str
    code: str
    message: str


class Awaited(Wire, extra="allow"):
    """What a turn has handed to other sessions, and how it continues when all results are there."""

    # The step that has requested it.
    at: Coordinates
    # The keys of the actions without a result.
    keys: tuple[str, ...]
    # How the turn continues. None: it has parked, and an answer of people begins the next one.
    request: JsonObject | None = None
    # When the turn fails, in seconds since the epoch: from then on its children are stopped.
    deadline: float | None = None
    # When the children on other servers need something next, in seconds since the epoch.
    look_at: float | None = None
    # Whether the children are still to be started, work, or were asked to stop; or whether their turn has ended
    # without them: then they are stopped, and their results are refused.
    phase: Literal["due", "started", "stopping", "abandoned"] = "due"


class DispatchChildren(Versioned):
    """Input of `dispatch_children`: start the sessions that do the calls of this step."""

    at: Coordinates
    # The trace of the turn.
    traceparent: str | None = None


class StopChildren(Versioned):
    """Input of `stop_children`: cancel the sessions that do the calls of this step."""

    at: Coordinates


class Pending(Wire):
    """The keys of the actions of a step that have no result yet."""

    keys: tuple[str, ...] = ()
    # After how many seconds the children on other servers need something. None: there are none.
    look_in: float | None = None


class LookAtChildren(Versioned):
    """Input of `look_at_children`: start, follow or cancel the sessions on other servers that do calls of this step."""

    at: Coordinates


class Looked(Wire):
    """What was found there."""

    # Deliveries with results. Drivers of builds that do not know them get them by a signal.
    results: tuple[DeliveryRef, ...] = ()
    look_in: float | None = None


class CallBack(Versioned):
    """Input of `call_back`: a session that has ended delivers its callback."""

    session_id: str


class CollectChildren(Versioned):
    """Input of `collect_children`: record the results that these deliveries bring."""

    at: Coordinates
    deliveries: tuple[DeliveryRef, ...] = ()


class ShowInputs(Versioned):
    """Input of `show_inputs`: show the requests of descendants that these deliveries are about."""

    # The step that waits for its children.
    at: Coordinates
    deliveries: tuple[DeliveryRef, ...] = ()
    # Whether a turn still waits for the children, and whether it parks with this: it has not yet.
    shows: bool = False
    parks: bool = False


class ShownInputs(Wire):
    """The requests that are open, and shown now."""

    open: tuple[OpenInput, ...] = ()
    head: int | None = None
    # The turn is to be cancelled, and shows nothing.
    cancelled: bool = False


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
    # The open input requests, and those of them that have expired.
    open: tuple[OpenInput, ...] = ()
    expired: tuple[str, ...] = ()
    # The next step, when the turn has continued as new.
    step: int = 0
    token_hash: str | None = None
    retired: tuple[str, ...] = ()
    traceparent: str | None = None
    # How many events the session had when the driver last knew.
    head: int | None = None
    # The deliveries that have entered the turn so far.
    joined: tuple[str, ...] = ()
    # Whether the driver can start a held turn again (`TurnResult.held`). Older drivers cannot.
    holds: bool = False
    bounds: Bounds | None = None
    # The session at the top of the family, if it is another one.
    root_session_id: str | None = None


class TurnResult(Versioned):
    """The result of a turn workflow for its driver."""

    snapshot: Snapshot
    action: Action
    # The session's token as this turn left it; None when it did not change.
    token_hash: str | None = None
    # Tokens that it replaced: a delivery that was accepted with one of them may still arrive.
    retired: tuple[str, ...] = ()
    failure: Failure | None = None
    model: str | None = None
    # The requests that are open now.
    open: tuple[OpenInput, ...] = ()
    cancelled: bool = False
    # The turn emitted no events.
    silent: bool = False
    # Set when no worker could serve the turn, for the reason in `failure`: the driver repeats it with this request.
    # As JSON, because a driver may be older than the turn, and must keep fields that it does not know.
    held: JsonObject | None = None
    head: int | None = None
    # How the next turns run: "inline", or as child workflows. None: as this one.
    turns: str | None = None
    # Set with the action `dispatch-runtime-actions`.
    awaited: Awaited | None = None
    # The deliveries of the inbox that have entered this turn.
    joined: tuple[str, ...] = ()
