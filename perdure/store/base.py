"""The store as the rest of Perdure sees it: one Protocol, two adapters, one conformance suite.

Everything a session says and does is written through `commit`: one transaction that fences, records, tells,
and updates the read model together. Writing the same commit twice is writing it once.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from perdure.protocol.deliveries import Capabilities, Mode
from perdure.protocol.events import Event, NewEvent, Usage
from perdure.protocol.inputs import InputAnswer, InputKind, InputRequest, InputStatus
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject

SessionStatus: TypeAlias = Literal["starting", "running", "waiting", "completed", "failed"]


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
    status: SessionStatus | None = None
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


@dataclass(frozen=True)
class Accepted:
    """The delivery as the store knows it: the new one, or the first one under the same idempotency key."""

    delivery: DeliveryRow
    fresh: bool


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
class Attempt:
    """One try at an activity. Later tries have a greater `generation`, whichever process makes them."""

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

    1. The session's row is locked. Missing: `SessionGone`.
    2. If a record in `unless` exists already, nothing is written and that record is returned
       (`Committed.existing`): somebody else has won.
    3. The fence: RAISE replaces an older generation (then `superseding` is appended, before `events`) and raises
       `Superseded` when a newer one stands; KEEP and RELEASE raise `Superseded` unless the fence stands with exactly
       this generation; RELEASE deletes it.
    4. `records` are inserted; one whose key exists stays as it was.
    5. `events` get the next indexes; one whose key exists is skipped.
    6. `consume`: these deliveries are marked as heard by `turn`, and their bodies dropped. One that another turn
       has heard, or that is gone or refused, raises `DeliveryTaken`, and nothing is written.
    7. `slots` are written; one with another version than expected raises `SlotConflict`, and nothing is written.
    8. `route`: the session's routes are replaced by this token hash (`TokenConflict` when another live session
       owns it, and nothing is written). `close`: all its routes and fences are deleted, and the session is over.
    9. `close_turn`: all fences of that turn are deleted: its late attempts may not write any more.
    10. `opens`: these requests are opened; one whose id exists stays as it was. `expires`: those of these requests
       that are still open become `expired`, with the answer that silence means. `withdraws`: those of these that are
       still open become `withdrawn`. `resolved`: a request in `expires` or `withdraws` that was closed by this
       commit gets the event with its id from here, after `events`.
    11. `change` is applied to the row. Readers are woken once the transaction is through.
    """

    session_id: str
    unless: tuple[int, int, str] | None = None
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
    change: SessionChange | None = None


@dataclass(frozen=True)
class Committed:
    # The row as it stands after the commit.
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


@dataclass(frozen=True)
class Answering:
    """What one caller says, in one transaction: all its votes, and the delivery that tells the session."""

    session_id: str
    votes: Sequence[Vote]
    # Written when a vote closed a request, or when `always` is set because it carries more than answers.
    delivery: NewDelivery
    always: bool = False


@dataclass(frozen=True)
class Answered:
    """The requests as they stand now, in the order of the votes, and which of them this caller's votes closed."""

    rows: Sequence[InputRow]
    closed: frozenset[str]
    # The new delivery, or the first one under the same idempotency key.
    delivery: DeliveryRow | None
    fresh: bool


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


# --- the store ----------------------------------------------------------------------------------------------


class Watch(Protocol):
    """A subscription to one session. Wakes at least once after each commit that appended events."""

    async def changed(self, within: float | None = None) -> bool:
        """Wait for news since the last call; False when `within` seconds passed without any."""
        ...


class Store(Protocol):
    """What every store does. Errors of the database that may pass are raised as `Unavailable`."""

    async def migrate(self) -> None:
        """Create or upgrade the schema. A newer or unknown schema is refused before any write."""
        ...

    async def check(self) -> None:
        """Refuse to go on unless the schema is exactly the one that this code knows."""
        ...

    async def close(self) -> None: ...

    # sessions
    async def create_session(self, session: NewSession, delivery: NewDelivery | None = None) -> Accepted | None:
        """Write row (status `starting`), route and first delivery together.

        With an idempotency key that is known: nothing is written, and the first delivery is returned (`fresh` is
        False); `IdempotencyConflict` when its digest differs. `TokenConflict` when a live session owns the token.
        """
        ...

    async def discard_session(self, session_id: str) -> None:
        """Forget a session that never started (status still `starting`), with its route and deliveries."""
        ...

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def sessions(self, query: SessionQuery) -> SessionPage: ...

    # routes
    async def route(self, token_hash: str) -> str | None: ...

    # deliveries
    async def accept(self, delivery: NewDelivery) -> Accepted:
        """Write the delivery, or find the first one under its idempotency key (`IdempotencyConflict` as above).

        `SessionGone` when the session is unknown or over.
        """
        ...

    async def withdraw(self, session_id: str, delivery_id: str) -> bool:
        """Forget a delivery that no turn has heard; False when it is too late."""
        ...

    async def refuse(self, session_id: str, delivery_id: str, code: str, event: NewEvent) -> bool:
        """Mark a delivery as refused and say so, in one transaction; False when a turn has heard it."""
        ...

    async def deliveries(self, session_id: str, delivery_ids: Sequence[str]) -> Sequence[DeliveryRow]:
        """Those that exist, in the order asked for."""
        ...

    async def unheard(
        self, *, kind: Literal["message", "answer"], older_than: float, session_id: str | None = None
    ) -> Sequence[DeliveryRow]:
        """Deliveries of this kind (`body.kind`) that were accepted more than `older_than` seconds ago into sessions
        that are not over, or into this one, and that no turn has heard, refused or withdrawn. At most 100, oldest
        first."""
        ...

    # inputs
    async def answer(self, answering: Answering, tell: Callable[[InputRow], NewEvent]) -> Answered:
        """Count the votes, each against the request as it stands: the first verdict wins.

        A vote on an open request is added to its votes (one per principal: the first) and, when
        `session.inputs.verdict` says so, closes it as `answered` with that answer and this delivery's id; then
        `tell(row)` is appended. A vote on a closed request changes nothing. An unknown request, or one of another
        session, raises `NotFound` before anything is written. Idempotency keys as for `accept`.
        """
        ...

    async def input(self, request_id: str) -> InputRow | None: ...

    async def inputs(self, query: InputQuery) -> InputPage: ...

    # journal
    async def commit(self, commit: Commit) -> Committed: ...

    async def records(self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None) -> Sequence[Record]:
        """Records of turns from_turn..to_turn (inclusive), ordered by turn, step, slot."""
        ...

    async def record(self, session_id: str, turn: int, step: int, slot: str) -> Record | None: ...

    async def slots(self, session_id: str, names: Sequence[str]) -> dict[str, Slot]: ...

    # events
    async def events(self, session_id: str, start: int = 0, limit: int = 500) -> Sequence[Event]:
        """Events with index >= start, in order."""
        ...

    async def index_of(self, session_id: str, key: str) -> int | None:
        """The index of the event with this key."""
        ...

    def watch(self, session_id: str) -> AbstractAsyncContextManager[Watch]: ...


async def read_all(store: Store, session_id: str, start: int = 0) -> AsyncIterator[Event]:
    """Every event that is there now."""
    while page := await store.events(session_id, start):
        for event in page:
            yield event
        start = page[-1].index + 1
