"""The arguments and results of the store: rows, queries and commits. Frozen values, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from perdure.protocol.deliveries import Bounds, Capabilities, Mode, Principal
from perdure.protocol.events import NewEvent, Usage
from perdure.protocol.inputs import InputAnswer, InputRequest
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptEnd, AttemptKey, AttemptReport
from perdure.store.runs import NewRun, RunChange

SessionStatus: TypeAlias = Literal["starting", "running", "waiting", "completed", "failed"]

#: The status that callers see. `needs_attention` takes precedence over every other status.
ShownStatus: TypeAlias = Literal["starting", "running", "waiting", "completed", "failed", "needs_attention"]


# --- what sessions and principals have spent ----------------------------------------------------------------

#: Units of cost in a US dollar: whole numbers, so that sums are exact.
DOLLAR = 1_000_000_000


@dataclass(frozen=True)
class Below:
    """What the descendants of a session have used."""

    usage: Usage = field(default_factory=Usage)
    # In billionths of a US dollar: each at the price of the agent that has used it, as far as that is known.
    cost: int = 0
    # The tokens and the cost of these when the session's latest turn began.
    tokens_before: int = 0
    cost_before: int = 0

    @property
    def dollars(self) -> float:
        return self.cost / DOLLAR


@dataclass(frozen=True)
class Spending:
    """What an account, a principal in a period, has spent: tokens, and billionths of a dollar."""

    account: str
    tokens: int
    cost: int


@dataclass(frozen=True)
class Reservation(Spending):
    """What an attempt may spend at most, and the limits of its account."""

    most_tokens: int | None = None
    most_cost: int | None = None


# --- sessions -----------------------------------------------------------------------------------------------


class _Member:
    """A session's place in its family. `parent` is `Lineage` as JSON, and None for a root."""

    parent: JsonObject | None

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent["sessionId"]

    @property
    def root_id(self) -> str | None:
        return None if self.parent is None else self.parent["rootSessionId"]


#: The tags of one session.
MOST_TAGS = 20


@dataclass(frozen=True)
class NewSession(_Member):
    """A session to create. Its row and its route are written in one transaction."""

    session_id: str
    agent: str
    mode: Mode
    token_hash: str
    principal: Principal
    capabilities: Capabilities = field(default_factory=Capabilities)
    parent: JsonObject | None = None
    title: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    bounds: Bounds | None = None
    # Where it reports its end: `{callId, subagentName, token, url}`. A secret.
    callback: JsonObject | None = field(default=None, repr=False)
    run: NewRun | None = None
    # Of `Sessions.execute`; kept in a slot.
    request: JsonObject | None = None
    # Its token was chosen by a caller: it continues what the session before it under this token has begun.
    named: bool = False
    # It is this lane of another session.
    lane: str | None = None
    lane_of: str | None = None


@dataclass(frozen=True)
class Instance:
    """One of the sessions that a name has had, which are numbered from 0. None as session: it was deleted."""

    number: int
    session_id: str | None


@dataclass(frozen=True)
class SessionRow(_Member):
    """The read model of a session. Every transaction that changes the session updates it too."""

    session_id: str
    agent: str
    mode: Mode
    status: SessionStatus
    principal: Principal
    capabilities: Capabilities
    created_at: str
    updated_at: str
    # Turns that began; steps and tool calls that finished.
    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    below: Below = field(default_factory=Below)
    # The number of events, which is the index of the next one.
    events: int = 0
    error: JsonObject | None = None
    parent: JsonObject | None = None
    title: str | None = None
    # The turn that a cancel request wants stopped; None again after it has ended.
    cancel_turn: int | None = None
    # If that turn had not begun: when the newest delivery was accepted that waited then. Later ones are not meant.
    cancel_until: str | None = None
    # `{code, message, since, number}` while the session cannot continue without help.
    attention: JsonObject | None = None
    # How many signals have failed since the workflow last received everything.
    unsignalled: int = 0
    bounds: Bounds | None = None
    # The session whose first turns it shares, and how many of them.
    forked_from: str | None = None
    forked_turns: int = 0
    # The place in it at which it was forked, as requested; None: at the end of the last shared turn.
    fork_place: JsonObject | None = None
    # Turns that prompts leave out: the first of each range, and the first after it.
    left_out: Sequence[tuple[int, int]] = ()
    records_expired: bool = False
    run: str | None = None
    # `main` once the session has other lanes. Those have their name here, and the session that they belong to.
    lane: str | None = None
    lane_of: str | None = None
    # Whether a message may wait that is to enter the running turn.
    steered: bool = False
    # What its owner has said of it: few short texts by name.
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    # For the model, with the next turn.
    notes: Sequence[str] = ()

    @property
    def shown_status(self) -> ShownStatus:
        return self.status if self.attention is None else "needs_attention"

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def spent(self) -> Usage:
        """What the session and its descendants have used."""
        return self.usage + self.below.usage

    @property
    def depth(self) -> int:
        """How many sessions are above it, here and on other servers."""
        above = self.bounds.depth if self.bounds else None
        return (self.parent or {}).get("depth", above or 0)

    @property
    def is_new_fork(self) -> bool:
        """Whether it is a fork in which nothing has happened yet: there is only the event of the fork."""
        return self.forked_from is not None and self.events == 1


@dataclass(frozen=True)
class Lane:
    """A lane of a session."""

    session_id: str
    name: str
    ended: bool
    # The number of its events.
    events: int


@dataclass(frozen=True)
class LaneSettings:
    """What was set for the lanes of a session, by their names, in place of what its agent declares.

    Lanes, fields and values of newer builds are kept.
    """

    agent: str
    lanes: Mapping[str, JsonObject] = field(default_factory=dict[str, JsonObject])


@dataclass(frozen=True)
class SessionChange:
    """What a commit changes in the read model. Counts and usage are added to the current ones."""

    status: SessionStatus | None = None
    # The number of turns that began. It never decreases, so a repeated commit counts once.
    turns: int | None = None
    steps: int = 0
    tool_calls: int = 0
    usage: Usage | None = None
    # What the usage costs, in billionths of a US dollar. Only the sessions above this one count it.
    cost: int = 0
    error: JsonObject | None = None


@dataclass(frozen=True)
class SessionQuery:
    """One page of sessions, newest first."""

    owner: str | None = None
    agent: str | None = None
    status: ShownStatus | None = None
    mode: Mode | None = None
    # The session that has started them.
    parent: str | None = None
    # One tag that they have: its name and its text.
    tag: tuple[str, str] | None = None
    limit: int = 50
    # Opaque; returned with the previous page.
    cursor: str | None = None


@dataclass(frozen=True)
class SessionPage:
    sessions: Sequence[SessionRow]
    next_cursor: str | None = None


@dataclass(frozen=True)
class EventQuery:
    """Which events of a session are wanted: all of these conditions hold for each of them."""

    # Its index is larger than `after`, and smaller than `before`.
    after: int = -1
    before: int = 2**53
    # Its type is one of `types`, if there are any, and none of `exclude`.
    types: Sequence[str] = ()
    exclude: Sequence[str] = ()
    turn: int | None = None
    attempt: int | None = None
    delivery_id: str | None = None
    # The last ones first.
    back: bool = False
    limit: int = 100


class AlreadyBegun(Exception):
    """A record of `Commit.without` exists: the work that the caller saw as not begun has begun meanwhile."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at an activity. A later attempt has a greater `generation`, in whichever process it runs.

    Numbers begin with 1. Number 0 fences off all earlier attempts without being one.
    """

    number: int
    generation: int
    #: How many attempts before this one fell silent: their worker died, froze or lost its connection.
    deaths: int = 0
    #: Who makes it, as host:pid:build.
    worker: str = ""
    #: When it counts as dead, if no heartbeat follows that with which it began; in seconds since the epoch.
    lease_until: float | None = None


class Hold(Enum):
    """What a commit does with the fence of its scope."""

    RAISE = "raise"
    """Take over the scope from any older attempt."""
    KEEP = "keep"
    """Write only if no newer attempt has taken over."""
    RELEASE = "release"
    """As KEEP, and remove the fence: whoever keeps it can write no more. `unless` stops those that raise it again."""


@dataclass(frozen=True)
class Fence:
    """A scope (`model`, `call/<id>`) of one step, and the attempt that writes to it."""

    turn: int
    step: int
    scope: str
    attempt: Attempt
    hold: Hold

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.turn, self.step, self.scope, self.attempt.generation)

    def report(self, status: AttemptEnd | None = None, error: JsonObject | None = None) -> AttemptReport:
        return AttemptReport(self.key, status, error)


# --- journal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewRecord:
    """An entry of the journal. `format` names the schema of `body`."""

    turn: int
    step: int
    key: str
    format: str
    body: JsonObject


@dataclass(frozen=True)
class Record(NewRecord):
    attempt: int | None = None
    at: str = ""
    # The length of the body as it is stored.
    size: int = 0


@dataclass(frozen=True)
class SlotWrite:
    """A write to an author's state slot. `expected` is the version that was read; None skips the check."""

    name: str
    # None: it has no value any more.
    value: JsonObject | None
    expected: int | None = None


@dataclass(frozen=True)
class Slot:
    name: str
    # None: it had no value yet at the turn to which the session was restored.
    value: JsonObject | None
    version: int


@dataclass(frozen=True)
class NewCheckpoint:
    """That the state of the session is kept as it is after this commit."""

    checkpoint_id: str
    turn: int
    step: int
    # One with a name is kept longer.
    name: str | None = None
    plan_step: int | None = None


@dataclass(frozen=True)
class Consumption:
    """The deliveries that a turn reads."""

    turn: int
    delivery_ids: Sequence[str]
    # How often each was edited when it was read; the commit raises `Unavailable` when it was edited since.
    edits: Mapping[str, int] = field(default_factory=dict[str, int])
    # How many of the notes that wait in the session its turn has read, oldest first.
    notes: int = 0


@dataclass(frozen=True)
class InputChanges:
    """What a commit does to input requests, and the events of those that it closes."""

    opens: Sequence[InputRequest] = ()
    # With the default answer of each.
    expires: Mapping[str, InputAnswer] = field(default_factory=dict[str, InputAnswer])
    withdraws: Sequence[str] = ()
    # By the request's id; also of those that the end of the session withdraws.
    resolved: Mapping[str, NewEvent] = field(default_factory=dict[str, NewEvent])


@dataclass(frozen=True)
class Commit:
    """One transaction on one session. Any exception rolls back all of it. It works in this order:

    1. Lock the session's row; `SessionGone` when there is none. `head`: raise `StoreBehind` when the session has fewer
       events than this, because the store is older than the caller. `current`: raise `Unavailable` when the number of
       events is not exactly `head`; the caller reads the session again. `left_out`: the same when prompts leave out
       other turns by now.
    2. `unless`: when this record exists, another attempt has won. Write nothing and return the record
       (`Committed.existing`). In a closed session, a `close` without a `fence` changes nothing, and a commit that adds
       something raises `Superseded`, unless it is `late`. `unless_cancelled`: raise `TurnCancelled` when this turn, or
       an earlier one, is to be stopped. `without`: raise `AlreadyBegun` when one of these records exists; `if_idle`:
       the same when a delivery waits.
    3. `fence`: RAISE replaces an older generation (then `superseding` is appended before `events`, or `continuing` if
       the reply that was interrupted can be continued: `Committed.partial`), and raises `Superseded` when the
       generation in the store is newer. KEEP and RELEASE raise `Superseded` unless the store has
       exactly this generation. RELEASE deletes the fence, and what it has reserved with it. `reserve`: reserve this
       with the fence, in place of what it had reserved; `BudgetReached` if the account has not so much left.
       `report`: what is noted of an attempt; without it, RAISE and RELEASE note that one begins and has succeeded.
       What the commit adds to the usage of the session is noted of its attempt, too.
    4. `records`: insert them. A record whose key exists is not changed.
    5. `consume`: mark these deliveries as read by this turn and drop their bodies. Raise `DeliveryTaken` when one is
       unknown, refused, or read by another turn. Drop the notes that the turn has read.
    6. `events`: append them at the next indexes. An event whose key exists is skipped. One that ends a turn settles
       the deliveries that the turn has read, and names them, unless the turn waits for people.
    7. `slots`: write them. Raise `SlotConflict` when a slot has another version than expected. `checkpoint`: keep the
       state of the session as it is now; when that is impossible, an event says so, and the commit goes on.
    8. `route`: replace the session's routes by this token hash; `TokenConflict` when another live session owns it.
       `close`: end the session, and delete its routes and fences.
    9. `close_turn`: delete all fences of that turn, so that attempts that hold one cannot write.
    10. `inputs`: open the requests of `opens`; a request whose id exists is not changed. Close those of `expires` that
       are still open as `expired`, and those of `withdraws` as `withdrawn`. The events in `resolved` of the requests
       that this commit closed are appended after `events`, but before an event that ends the session. `close` refuses
       the deliveries that no turn has read; the events of the refusals come before the last event, too.
    11. `run`: change the record of the run, which `close` ends. `spends`: add this to the account. `change`: apply it
       to the row, and add its usage and cost to the `below` of every session above it. A commit that ends a turn
       settles a cancel request for that turn; `close` settles one for any turn; `settles_cancel` settles one without
       ending a turn, if no turn is expected. A commit that raises a fence, ends a turn, closes the session or
       `recovers` shows progress, so it clears the session's attention and emits an event. Readers wake after the
       transaction has committed.
    """

    session_id: str
    head: int | None = None
    current: bool = False
    left_out: Sequence[tuple[int, int]] | None = None
    unless_cancelled: int | None = None
    unless_steered: bool = False
    unless: tuple[int, int, str] | None = None
    without: Sequence[tuple[int, int, str]] = ()
    if_idle: bool = False
    fence: Fence | None = None
    superseding: NewEvent | None = None
    continuing: NewEvent | None = None
    records: Sequence[NewRecord] = ()
    events: Sequence[NewEvent] = ()
    consume: Consumption | None = None
    slots: Sequence[SlotWrite] = ()
    checkpoint: NewCheckpoint | None = None
    route: str | None = None
    close: bool = False
    close_turn: int | None = None
    inputs: InputChanges = field(default_factory=InputChanges)
    settles_cancel: bool = False
    recovers: bool = False
    late: bool = False
    change: SessionChange | None = None
    reserve: Reservation | None = None
    spends: Spending | None = None
    run: RunChange | None = None
    report: AttemptReport | None = None


@dataclass(frozen=True)
class Committed:
    session: SessionRow
    # The record of `Commit.unless` that existed already; nothing was written then.
    existing: Record | None = None
    # Whether this commit took the fence from an older attempt.
    superseded: bool = False
    # What older attempts have streamed of the reply with which this one goes on. None: it begins anew.
    partial: "Partial | None" = None


@dataclass(frozen=True)
class Partial:
    """The beginning of a reply that was interrupted: what readers have seen of it, and what is not retracted."""

    text: str
    reasoning: str = ""


class SlotConflict(Exception):
    """A state slot changed since it was read."""


class Steered(Exception):
    """A message waits that is to enter the running turn."""


class DeliveryTaken(Exception):
    """A delivery was read by another turn, or was refused."""
