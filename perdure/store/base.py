"""The interface of the store: one Protocol, two adapters, one conformance suite.

A turn writes through `commit`: one transaction that checks the fence, inserts records, appends events and updates the
read model. It is idempotent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from perdure.errors import Unavailable
from perdure.protocol.deliveries import MAIN
from perdure.protocol.events import Event, NewEvent
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.store.lifecycle import DeadLetter, DeadLetterPage, DeadLetterQuery, Keep, Restoration

from .attempts import AttemptKey, failed_with, stopped
from .deliveries import (
    Accepted,
    CancelRequest,
    Change,
    DeliveryPage,
    DeliveryQuery,
    DeliveryRow,
    NewDelivery,
    Unsignalled,
)
from .inputs import Answered, Answering, InputPage, InputQuery, InputRow, Waits
from .lifecycle import CallbackStatus, Deletion, DueCallback, Forked, NewFork, NewImport, NewRemoteCall, RemoteCall
from .runs import RunPage, RunQuery, RunRecord
from .values import (
    Commit,
    Committed,
    EventQuery,
    Instance,
    Lane,
    LaneSettings,
    NewSession,
    Record,
    SessionPage,
    SessionQuery,
    SessionRow,
    Slot,
)

if TYPE_CHECKING:
    from .attempts import AttemptStore
    from .checkpoints import CheckpointStore
    from .streams import StreamStore


T = TypeVar("T")


class Watch(Protocol):
    """A subscription to one session. It wakes at least once after each commit that appended events."""

    async def changed(self, within: float | None = None) -> bool:
        """Wait for a change since the last call; False when there was none within `within` seconds."""
        ...


class RawRecord(NamedTuple):
    """A record whose body is still text."""

    turn: int
    step: int
    key: str
    format: str
    text: str
    attempt: int | None
    at: str


class Store(Protocol):
    """Operations of every store. Transient errors of the database are raised as `Unavailable`."""

    async def migrate(self) -> None:
        """Create or upgrade the schema. A foreign schema, or one that needs newer code, is refused before any write."""

    async def check(self) -> int:
        """The version of the schema. One that this code cannot work with is refused: an older one, or one that needs
        newer code."""
        ...

    async def close(self) -> None: ...

    # sessions
    async def create_session(self, session: NewSession, delivery: NewDelivery | None = None) -> Accepted | None:
        """Write the row (status `starting`), the route and the first delivery in one transaction.

        When the idempotency key is known, nothing is written and the first delivery is returned (`fresh` is False);
        `IdempotencyConflict` when its digest differs. `TokenConflict` when a live session owns the token. `SessionGone`
        when the parent has ended, or is being deleted; `SessionDeleted` when the child was.
        """
        ...

    async def fork(self, fork: NewFork) -> Forked:
        """Write a session that shares the first turns of another one, in one transaction, however many they are.

        It has the parent's agent, owner and capabilities, and the parent's slots as they were at the end of `turn`:
        `ForkRefused` when that is not known. The caller has checked that the turn has ended and waits for nobody.
        `SessionNotFound` when there is no parent. Idempotency keys as for `accept`.
        """
        ...

    async def expire(self, keep: Keep, cursor: str | None, limit: int) -> str | None:
        """Delete what is older than it is to be kept, of the next `limit` sessions; the cursor of those after them.

        A turn loses its deltas or messages as a whole, and only when another one has begun or the session has ended.
        Records go when the session has ended and no fork shares them. `events` shows deleted events as `event.expired`.
        """
        ...

    async def slots_at(self, session_id: str, turn: int) -> Sequence[Slot]:
        """The session's slots as they were at the end of the turn; `ForkRefused` when that is not known, or expired."""
        ...

    async def import_session(self, new: NewImport) -> None:
        """Write the session with all of its records in one transaction; `Conflict` if the file was imported before."""
        ...

    async def restore(self, restoration: Restoration) -> SessionRow:
        """Leave turns out of later prompts, and append `session.reset`. A repetition changes nothing.

        `SessionGone` when the session has ended, `RestoreRefused` when requests are open, and for a turn to go back to
        also when there is none, when the slots at its end are not known, or when a turn runs that needs no attention.
        """
        ...

    # deletions
    async def begin_deletion(self, session_id: str) -> Deletion | None:
        """Write the session's tombstone and take away its token; None when there was never such a session.

        From then on it cannot be forked. Repeating it returns the tombstone.
        """
        ...

    async def deletion(self, session_id: str) -> Deletion | None: ...

    async def unfinished_deletions(self, limit: int) -> Sequence[str]:
        """The ids of the sessions with a tombstone that are not yet deleted, oldest first, without unfinished parts."""
        ...

    async def delete_children(self, session_id: str, limit: int) -> bool:
        """Write the tombstones of `limit` children of a session that has one; True when all of them have one.

        Their deletions are parts of that of the session, which has no more children from its own tombstone on.
        """
        ...

    async def unfinished_parts(self, session_id: str, limit: int) -> Sequence[str]:
        """The ids of the children whose deletion is a part of that of the session, and not finished."""
        ...

    async def purge(self, session_id: str, limit: int) -> bool:
        """Delete about `limit` rows of a session with a tombstone; True when none is left.

        `Unavailable` while the session has not ended. Its children get their tombstones first. Forks get the records
        that they share; then the session's row goes, so that no worker can write; then everything else.
        """
        ...

    async def count_executions(self, session_id: str, executions: int) -> None:
        """Note how many executions one process has asked Temporal to delete; the receipt has the largest number."""

    async def finish_deletion(self, session_id: str, executions: int) -> Deletion | None:
        """Note that nothing is left, and how many executions Temporal has deleted; not while parts are unfinished."""
        ...

    async def forget_deletions(self, older_than: float, limit: int) -> int:
        """Delete tombstones that were finished so many seconds ago; returns how many."""
        ...

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def sessions(self, query: SessionQuery) -> SessionPage:
        """One page of sessions; runs are not among them."""
        ...

    async def set_tags(self, session_id: str, changes: Mapping[str, str | None]) -> SessionRow:
        """Set tags of the session, which may have ended, and take away those that are None. The others stay.

        `SessionGone` when it is unknown, `Invalid` when it would have more than `MOST_TAGS`.
        """
        ...

    async def lanes(self, session_id: str) -> Sequence[Lane]:
        """The lanes of the session but the main one, also the newest of those that have ended, oldest first."""
        ...

    async def lane_settings(self, session_id: str) -> LaneSettings | None:
        """What was set for the lanes of the session; None: it is unknown."""
        ...

    async def set_lane(self, session_id: str, lane: str, changes: JsonObject) -> LaneSettings:
        """Set fields of a lane, also of one that has not begun; None as a value: as the agent declares it.

        `SessionGone` when the session has ended.
        """
        ...

    async def family(self, root_id: str, cursor: str | None = None, limit: int = 200) -> SessionPage:
        """One page of the descendants of a root, without itself, oldest first."""
        ...

    async def run(self, run_id: str) -> RunRecord | None:
        """The record of a run. It is written with its session, and ends in the commit that closes that."""
        ...

    async def runs(self, query: RunQuery) -> RunPage: ...

    async def open_sessions(self, after: str, limit: int) -> Sequence[str]:
        """The ids of sessions that have not ended, in order, starting after `after`."""
        ...

    async def cancel(
        self, session_id: str, turn_id: str | None, to_event: Callable[[int], NewEvent]
    ) -> CancelRequest | None:
        """Record a cancel request for the turn that runs, waits for input or is about to begin.

        None when there is no such turn, or it is not `turn_id`. `to_event` makes the event from the turn's number. From
        then on, a commit with `unless_cancelled` of that turn raises `TurnCancelled`.
        """
        ...

    async def set_attention(self, session_id: str, attention: Attention, turn: int | None = None) -> bool:
        """Mark the session as in need of attention and emit an event.

        False when it is marked with the same code, has ended, or `turn` has ended meanwhile.
        """
        ...

    async def route(self, token_hash: str) -> str | None: ...

    async def instance(self, token_hash: str, number: int | None = None) -> Instance | None:
        """The newest session that this token has had; with `number`, the first one that has not a smaller one."""
        ...

    async def number_of(self, session_id: str) -> int | None:
        """The number of the session among those of its token."""
        ...

    async def name_session(self, token_hash: str, session_id: str) -> None:
        """Number a session of this token that an older build has started. Idempotent."""

    async def token_of(self, session_id: str) -> str | None:
        """The hash of the session's token."""
        ...

    # deliveries
    async def accept(self, delivery: NewDelivery) -> Accepted:
        """Write the delivery, or find the first one under its idempotency key (`IdempotencyConflict` as above).

        `SessionGone` when the session is unknown or has ended; `InboxFull` when `delivery.limit` deliveries wait.
        """
        ...

    async def first(self, delivery: NewDelivery) -> Accepted | None:
        """The delivery that was accepted under this idempotency key or this id (`IdempotencyConflict` as above)."""
        ...

    async def refuse(self, session_id: str, delivery_id: str, code: str, event: NewEvent) -> bool:
        """Mark a delivery as refused and append the event, in one transaction; False when a turn has read it.

        For an unknown delivery only the event is appended. When no delivery is left to begin a turn, a cancel request
        for that turn is settled.
        """
        ...

    async def deliveries(self, session_id: str, delivery_ids: Sequence[str]) -> Sequence[DeliveryRow]:
        """The deliveries that exist, in the order of the given ids."""
        ...

    async def find_delivery(self, delivery_id: str) -> Sequence[DeliveryRow]:
        """The deliveries with this id, in any session: one, unless it is an id that Perdure derives for itself."""
        ...

    async def list_deliveries(self, query: DeliveryQuery) -> DeliveryPage: ...

    async def queue(self, session_id: str, lane: str = MAIN) -> Sequence[DeliveryRow]:
        """What waits in a lane, in the order in which it will be read, without the bodies."""
        ...

    async def steers(self, session_id: str) -> Sequence[str]:
        """The messages that wait to enter the running turn, in order."""
        ...

    async def place_in_queue(self, delivery: DeliveryRow) -> int:
        """How many deliveries wait up to this one, with it."""
        ...

    async def edit_delivery(self, delivery: DeliveryRow, change: Change) -> DeliveryRow | None:
        """Replace the body of a delivery that waits; None when it waits no more, or was edited since it was read."""
        ...

    async def unread(self, session_id: str) -> Sequence[DeliveryRow]:
        """The session's deliveries that were neither read nor refused, in order, without their bodies."""
        ...

    async def count_unread(self, session_id: str) -> int: ...

    async def waits(self, session_ids: Sequence[str]) -> Mapping[str, Waits]:
        """What these sessions wait for: of each one its open requests, oldest first, and its unread deliveries."""
        ...

    async def unsignalled(self, *, older_than: float, after: str, limit: int) -> Sequence[Unsignalled]:
        """Sessions whose workflow may not have received everything, in the order of their ids, starting after `after`.

        A delivery older than `older_than` seconds waits, a cancel request is open, the session has not begun for so
        long, or a signal has failed.
        """
        ...

    async def begin_waiting(self, session_id: str) -> None:
        """Note that a new session, whose workflow runs, waits for its first delivery; nothing if one is there."""

    async def mark_unsignalled(self, session_id: str) -> None:
        """Count one more signal that failed."""

    async def clear_unsignalled(self, session_id: str, marks: int) -> None:
        """Note that the workflow has received everything, unless the session has another number of marks by now."""

    # other servers
    async def due_callbacks(self, limit: int) -> Sequence[str]:
        """The sessions that have ended and have to deliver their callback now."""
        ...

    async def claim_callback(self, session_id: str, lease: float) -> DueCallback | None:
        """Take a callback that is due, for so many seconds: no other process tries it meanwhile."""
        ...

    async def delay_callback(self, due: DueCallback, seconds: float) -> None:
        """Note that this try has failed, and when the next one is due."""

    async def settle_callback(self, session_id: str, outcome: str) -> None:
        """Note how the callback has ended, and forget its address and its token."""

    async def callback(self, session_id: str) -> CallbackStatus | None: ...

    async def begin_remote_call(self, call: NewRemoteCall) -> RemoteCall:
        """Write the call, or find it as it was begun before."""
        ...

    async def remote_call(self, session_id: str, action: str) -> RemoteCall | None: ...

    async def remote_call_by_token(self, token_hash: str) -> RemoteCall | None:
        """The call whose end may be reported with this token."""
        ...

    async def advance_remote_call(self, call: RemoteCall, state: JsonObject) -> None:
        """Replace the state of a call that has not ended."""

    async def end_remote_call(self, call: RemoteCall, result: JsonObject, state: JsonObject) -> Accepted | None:
        """Accept the result of the call and deliver it to its session, in one transaction.

        None when another result was accepted before, or the session has ended. The token of the call is spent then.
        """
        ...

    async def report_end(self, session_id: str) -> None:
        """Deliver to the session's parent that it has ended, if it has: an older build may have ended it silently."""

    # inputs
    async def answer(self, answering: Answering, to_event: Callable[[InputRow], NewEvent]) -> Answered:
        """Count the votes against the current state of the requests. The first verdict wins.

        A vote on an open request is added to its votes (only the first one of each principal, unless it `ends` the
        request). When `session.inputs.verdict` returns an answer, or a vote `ends` the request, it is closed as
        `answered` with that answer and this delivery's id, and the event `to_event(row)` is appended. A vote on a
        closed request changes nothing. An unknown request, or one of another session, raises `NotFound` before any
        write. Idempotency keys as for `accept`.
        """
        ...

    async def input(self, request_id: str) -> InputRow | None: ...

    async def inputs(self, query: InputQuery) -> InputPage: ...

    # dead letters
    async def dead_letter(self, session_id: str, turn: int) -> DeadLetter | None: ...

    async def dead_letters(self, query: DeadLetterQuery) -> DeadLetterPage: ...

    async def mark_requeued(self, session_id: str, turn: int) -> None:
        """Note that the messages of the failed turn were delivered again. Idempotent."""

    # journal
    async def commit(self, commit: Commit) -> Committed: ...

    async def records(self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None) -> Sequence[Record]:
        """Records of the turns from_turn to to_turn (inclusive), ordered by turn, step and key.

        Those of a fork include the turns that it shares.
        """
        ...

    async def raw_records(
        self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None
    ) -> Sequence[RawRecord]:
        """The same, with bodies that are still text."""
        ...

    async def outline(self, session_id: str, turn: int, step: int | None = None) -> Sequence[Record]:
        """The records of one turn. Only those that may have ended it, or this step of it, have their bodies.

        The others have `{}`.
        """
        ...

    async def record(self, session_id: str, turn: int, step: int, key: str) -> Record | None: ...

    async def slots(self, session_id: str, names: Sequence[str] | None = None) -> dict[str, Slot]:
        """The slots with these names; None: all of them."""
        ...

    # reports of attempts, and checkpoints
    @property
    def attempts(self) -> "AttemptStore": ...
    @property
    def checkpoints(self) -> "CheckpointStore": ...

    @property
    def streams(self) -> "StreamStore": ...

    # events
    async def events(self, session_id: str, start: int = 0, limit: int = 500) -> Sequence[Event]:
        """Events with index >= start, in order."""
        ...

    async def find_events(self, session_id: str, query: EventQuery) -> Sequence[Event]:
        """The first events that the query asks for, without those that retention has deleted."""
        ...

    async def index_of(self, session_id: str, key: str) -> int | None:
        """The index of the event with this key."""
        ...

    def watch(self, session_id: str) -> AbstractAsyncContextManager[Watch]: ...


#: Half a minute in all: longer than a failover, shorter than a caller's time-out.
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)


async def commit_with_retries(store: Store, commit: Commit) -> Committed:
    """Commit the result of work that is done already, with retries: if it were lost, the work would be repeated."""
    return await with_retries(lambda: store.commit(commit))


async def with_retries(work: Callable[[], Awaitable[T]]) -> T:
    """Do what a result needs before it is recorded: it is repeated while the store cannot be reached."""
    for pause in _PAUSES:
        try:
            return await work()
        except Unavailable:
            await asyncio.sleep(pause)
    return await work()


#: Seconds for a write on the way out of a failure.
_LAST_WRITE = 5.0


async def write_at_last(work: Awaitable[object], log: logging.Logger, otherwise: str) -> None:
    """Write on the way out of a failure, which this must neither delay for long nor hide."""
    try:
        async with asyncio.timeout(_LAST_WRITE):
            await work
    except Exception as error:
        log.warning("%s: %s", otherwise, type(error).__name__)


_log = logging.getLogger("perdure.store")


@asynccontextmanager
async def reported(
    store: Store, session_id: str, key: AttemptKey, *, stops: type[Exception] | None = None
) -> AsyncGenerator[None]:
    """Note how this attempt has ended if it fails. One that succeeds notes that with its last commit.

    `stops`: raised by an attempt that has stopped because it was asked to.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        report = stopped(key) if stops is not None and isinstance(error, stops) else failed_with(key, error)
        if report is not None:
            noting = store.attempts.report(session_id, report)
            await write_at_last(noting, _log, f"the end of an attempt at {session_id} was not noted")
        raise
