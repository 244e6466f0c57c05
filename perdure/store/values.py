"""What goes into a store and what comes out of it: rows, queries and commits. Frozen values, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from perdure.protocol.deliveries import Capabilities, Mode
from perdure.protocol.events import NewEvent, Usage
from perdure.protocol.inputs import InputAnswer, InputKind, InputRequest, InputStatus
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject

SessionStatus: TypeAlias = Literal["starting", "running", "waiting", "completed", "failed"]

#: As people see it: a session that cannot go on by itself is that first of all.
ShownStatus: TypeAlias = Literal["starting", "running", "waiting", "completed", "failed", "needs_attention"]


# --- sessions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewSession:
    """A session that is about to start: its row and its route are written in one transaction."""

    session_id: str
    agent: str
    mode: Mode
    token_hash: str
    principal: Principal
    capabilities: Capabilities = field(default_factory=Capabilities)
    parent: JsonObject | None = None
    title: str | None = None


@dataclass(frozen=True)
class SessionRow:
    """The read model of a session, kept current by the same transactions that make it so."""

    session_id: str
    agent: str
    mode: Mode
    status: SessionStatus
    principal: Principal
    capabilities: Capabilities
    created_at: str
    updated_at: str
    # Turns begun, steps and tool calls settled.
    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    # The index that the next event will get.
    events: int = 0
    error: JsonObject | None = None
    parent: JsonObject | None = None
    title: str | None = None
    # The turn that somebody wants stopped; None again once it has ended.
    cancel_turn: int | None = None
    # `{code, message, since}` while the session cannot go on by itself.
    attention: JsonObject | None = None
    # How often Temporal could not be told of something, since it was last told everything.
    untold: int = 0

    @property
    def shown_status(self) -> ShownStatus:
        return self.status if self.attention is None else "needs_attention"

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed")


@dataclass(frozen=True)
class SessionChange:
    """What a commit changes in the read model; counts and usage are added."""

    status: SessionStatus | None = None
    # The number of turns begun; never lowered, so that a repeated commit counts once.
    turns: int | None = None
    steps: int = 0
    tool_calls: int = 0
    usage: Usage | None = None
    error: JsonObject | None = None


@dataclass(frozen=True)
class SessionQuery:
    """One page of sessions, newest first."""

    owner: str | None = None
    agent: str | None = None
    status: ShownStatus | None = None
    mode: Mode | None = None
    limit: int = 50
    # Opaque; comes from the page before.
    cursor: str | None = None


@dataclass(frozen=True)
class SessionPage:
    sessions: Sequence[SessionRow]
    next_cursor: str | None = None


# --- deliveries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewDelivery:
    """A delivery that is about to be accepted. `body` is `DeliveryBody` as JSON."""

    session_id: str
    delivery_id: str
    body: JsonObject
    # Owner of the idempotency key; keys of two owners never meet.
    owner: str
    idempotency_key: str | None = None
    # Of the whole request; decides whether a repeated key is a repeated request.
    digest: str | None = None
    # What Temporal is told of it (`DeliveryRef` as JSON), so that anybody can tell it again.
    ref: JsonObject | None = None
    # How many deliveries may wait in the session; with as many, this one is not accepted.
    limit: int | None = None


@dataclass(frozen=True)
class DeliveryRow:
    session_id: str
    delivery_id: str
    # None once a turn has heard it: then it stands in the journal.
    body: JsonObject | None
    # The turn that heard it.
    turn: int | None
    # Why no turn will hear it.
    refused: str | None
    accepted_at: str
    kind: str = "message"
    ref: JsonObject | None = None

    @property
    def unheard(self) -> bool:
        """Whether a turn may still read it."""
        return self.turn is None and self.refused is None


@dataclass(frozen=True)
class Accepted:
    """The delivery as the store knows it: the new one, or the first one under the same idempotency key."""

    delivery: DeliveryRow
    fresh: bool
    # Temporal may not know of what was accepted before it.
    untold: bool = False


@dataclass(frozen=True)
class Untold:
    """A session of which Temporal may not know everything."""

    session_id: str
    # When its newest delivery was accepted, of those that wait; and the turn that is to be stopped.
    newest: str | None = None
    cancel_turn: int | None = None
    # Somebody has tried to tell Temporal, and could not.
    failed: bool = False


@dataclass(frozen=True)
class CancelRequest:
    """An accepted wish to stop a turn."""

    session_id: str
    turn: int


# --- attempts and fences ------------------------------------------------------------------------------------


class Begun(Exception):
    """Something that had not begun when it was looked at has begun since."""


@dataclass(frozen=True)
class Attempt:
    """One try at an activity. Later tries have a greater `generation`, whichever process makes them.

    Numbers begin with 1; with 0, a scope is closed to all that were made before.
    """

    number: int
    generation: int


class Hold(Enum):
    """What a commit does with the fence of its scope."""

    RAISE = "raise"
    """Take the scope over from any older attempt."""
    KEEP = "keep"
    """Write only while no newer attempt has taken over."""
    RELEASE = "release"
    """As KEEP, and close the scope: nobody writes to it any more."""


@dataclass(frozen=True)
class Fence:
    """A scope (`model`, `call/<id>`) of one step, and the attempt that wants to write to it."""

    turn: int
    step: int
    scope: str
    attempt: Attempt
    hold: Hold


# --- journal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewRecord:
    """An entry of the journal; `format` says who can read `body`."""

    turn: int
    step: int
    slot: str
    format: str
    body: JsonObject


@dataclass(frozen=True)
class Record(NewRecord):
    attempt: int | None = None
    at: str = ""


@dataclass(frozen=True)
class SlotWrite:
    """An author's state slot. `expected` is the version that was read; None means: whatever it is now."""

    name: str
    value: JsonObject
    expected: int | None = None


@dataclass(frozen=True)
class Slot:
    name: str
    value: JsonObject
    version: int


@dataclass(frozen=True)
class Commit:
    """One transaction on one session. The order of the fields is the order of the work.

    1. The session's row is locked. Missing: `SessionGone`. `head`: a session that has fewer events than this is older
       than the caller: `StoreBehind`. `current`: one that has more has changed since: `Unavailable`; read it again.
    2. If a record in `unless` exists already, nothing is written and that record is returned
       (`Committed.existing`): somebody else has won. In a closed session `close` changes nothing, and what adds to it
       raises `Superseded`. `heeds`: when this turn, or one before it, is to be stopped, `TurnCancelled` is raised.
       `without`: when one of these records exists, `Begun` is raised.
    3. The fence: RAISE replaces an older generation (then `superseding` is appended, before `events`) and raises
       `Superseded` when a newer one stands; KEEP and RELEASE raise `Superseded` unless the fence stands with exactly
       this generation; RELEASE deletes it.
    4. `records` are inserted; one whose key exists stays as it was.
    5. `events` get the next indexes; one whose key exists is skipped.
    6. `consume`: these deliveries are marked as heard by `turn`, and their bodies dropped. One that another turn
       has heard, or that is gone or refused, raises `DeliveryTaken`, and nothing is written.
    7. `slots` are written; one with another version than expected raises `SlotConflict`, and nothing is written.
    8. `route`: the session's routes are replaced by this token hash (`TokenConflict` when another live session
       owns it, and nothing is written). `close`: all its routes and fences are deleted, and the session is over;
       deliveries that no turn has read are refused, and readers are told so before the last event.
    9. `close_turn`: all fences of that turn are deleted: its late attempts may not write any more.
    10. `opens`: these requests are opened; one whose id exists stays as it was. Those of `expires` that are still open
       become `expired`, with the answer that silence means; those of `withdraws`, `withdrawn`. `resolved`: those that
       were closed by this commit get their event from here, after `events`, but before one that ends the session.
    11. `change` is applied to the row. A commit that ends a turn settles a cancellation of that turn
       (`settles_cancel` does it without ending one, if no turn is expected any more; `close` settles that of any
       turn). One that raises a fence, ends a turn or closes the session, or `recovers`, shows that the session goes
       on: an attention is taken back, and readers are told. Readers are woken once the transaction is through.
    """

    session_id: str
    head: int | None = None
    current: bool = False
    heeds: int | None = None
    unless: tuple[int, int, str] | None = None
    without: Sequence[tuple[int, int, str]] = ()
    fence: Fence | None = None
    superseding: NewEvent | None = None
    records: Sequence[NewRecord] = ()
    events: Sequence[NewEvent] = ()
    consume: Sequence[str] = ()
    consume_turn: int | None = None
    slots: Sequence[SlotWrite] = ()
    route: str | None = None
    close: bool = False
    close_turn: int | None = None
    opens: Sequence[InputRequest] = ()
    expires: Mapping[str, InputAnswer] = field(default_factory=dict[str, InputAnswer])
    withdraws: Sequence[str] = ()
    resolved: Mapping[str, NewEvent] = field(default_factory=dict[str, NewEvent])
    settles_cancel: bool = False
    recovers: bool = False
    change: SessionChange | None = None


@dataclass(frozen=True)
class Committed:
    session: SessionRow
    # The record that was there already; then nothing was written.
    existing: Record | None = None
    # Whether the fence was taken from an older attempt.
    superseded: bool = False


class SlotConflict(Exception):
    """A state slot changed since it was read."""


class DeliveryTaken(Exception):
    """A delivery was heard by another turn, refused or withdrawn."""


# --- inputs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputRow:
    """What a session asks of people, and how that stands."""

    request: InputRequest
    status: InputStatus
    opened_at: str
    # The principal that owns the session.
    requester: Principal
    # Everything that was said, in order; the one that counts is `answer`.
    votes: Sequence[InputAnswer] = ()
    answer: InputAnswer | None = None
    closed_at: str | None = None
    # The delivery that tells the session of the answer; whoever gives the same answer again signals it again.
    delivery_id: str | None = None


@dataclass(frozen=True)
class Vote:
    """One principal's answer to one request. Whether it may answer at all was checked before."""

    request_id: str
    answer: InputAnswer
    # It closes the request whatever was voted before, also by the same principal.
    ends: bool = False


@dataclass(frozen=True)
class Answering:
    """What one caller says, in one transaction: all its votes, and the delivery that tells the session."""

    session_id: str
    votes: Sequence[Vote]
    # Written when a vote closed a request; when one came too late for its request, with `late`; else with `always`.
    delivery: NewDelivery
    always: bool = False
    late: bool = False


@dataclass(frozen=True)
class Answered:
    """The requests as they stand now, in the order of the votes, and which of them this caller's votes closed."""

    rows: Sequence[InputRow]
    closed: frozenset[str]
    # The new delivery, or the first one under the same idempotency key.
    delivery: DeliveryRow | None
    fresh: bool
    # Temporal may not know of what was accepted before it.
    untold: bool = False


@dataclass(frozen=True)
class InputQuery:
    """One page of requests, oldest first."""

    session_id: str | None = None
    agent: str | None = None
    kind: InputKind | None = None
    status: InputStatus | None = "open"
    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True)
class InputPage:
    rows: Sequence[InputRow]
    next_cursor: str | None = None
