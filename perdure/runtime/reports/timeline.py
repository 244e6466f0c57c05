"""The timeline of a session: its events, and beside them what has happened to its deliveries and attempts.

What stands beside the events is in no log: clients count the lines of the log. It is made of the rows of deliveries and
attempts each time, so it has no index, and nothing resumes by it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from perdure.errors import Invalid
from perdure.protocol import names
from perdure.protocol.events import PIECES, BesideType, Event, EventType
from perdure.protocol.stream_policy import StreamPolicy
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptRow, Earlier
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.engine.rows import before
from perdure.store.values import EventQuery

from .attempts import error_of, place

#: Rows of attempts and of deliveries that one page looks at.
_MOST = 1_000

#: Seconds by which what happens may come late, by its own time.
_LATE = 60.0

#: Of entries with one time: what ends or waits comes before the events of that time, and what they begin after them.
_BEFORE, _EVENT, _AFTER = range(3)

#: What is shown of the data of events: what happened, without what was said.
_PLAIN = (
    *("code", "status", "finishReason", "usage", "reason", "attempt", "phase", "decision", "callId", "toolName"),
    *("requestId", "childSessionId", "deliveryId", "left", "keptFromTurn"),
)


_OF_PROGRESS = (
    *(EventType.PLAN_UPDATED, EventType.SESSION_ROLLED_BACK),
    *(EventType.CHECKPOINT_CREATED, EventType.CHECKPOINT_FAILED),
)


@dataclass(frozen=True)
class Entry:
    """One line of a timeline."""

    at: str
    type: str
    data: JsonObject
    # None: it is in no log.
    index: int | None = None
    rank: int = _EVENT

    @property
    def key(self) -> tuple[str, str]:
        """What distinguishes an entry beside the events from all others."""
        return self.type, str(self.data.get("attemptId") or self.data.get("deliveryId") or self.data.get("after"))

    @property
    def shown(self) -> JsonObject:
        line: JsonObject = {"at": self.at, "type": self.type, "data": self.data}
        return line if self.index is None else {**line, "index": self.index}


@dataclass(frozen=True)
class TimelinePage:
    entries: Sequence[Entry]
    # Where the next page begins; None: this one ends now.
    next_cursor: str | None = None
    # Whether so much happened beside the events that some of it is not here.
    truncated: bool = False


class Timeline:
    def __init__(self, store: Store, policy: StreamPolicy) -> None:
        """`policy`: what readers of events do not see."""
        self._store = store
        self._policy = policy

    async def page(self, session_id: str, cursor: str | None, limit: int) -> TimelinePage:
        """The entries of the next `limit` events."""
        after = _read_cursor(cursor)
        # Nobody reads pieces here: they come whole later.
        exclude = sorted({*PIECES, *self._policy.exclude})
        query = EventQuery(after=after, exclude=exclude, limit=limit + 1)
        found = await self._store.find_events(session_id, query)
        events, more = found[:limit], len(found) > limit
        beside = Beside(self._store, session_id, self._policy)
        since = await beside.time_after(after)
        until = events[-1].at if more else None
        happened, complete = await beside.entries(since, until)
        paused = _Pauses(await _parked_turn(self._store, session_id, after))
        entries = merged([each for event in events for each in paused.with_event(event)], happened, since)
        next_cursor = str(events[-1].index) if more else None
        return TimelinePage(entries, next_cursor, not complete)


def _read_cursor(cursor: str | None) -> int:
    """The index of the event after which a page begins."""
    if cursor is None:
        return -1
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 15):
        raise Invalid("The cursor is not one that this server gave out.")
    return int(cursor)


#: A time and what happened then, in order.
Lines: TypeAlias = Iterable[Entry]


def merged(events: Lines, beside: Lines, since: str = "") -> list[Entry]:
    """The events in the order of the log, and between them what happened beside them, by its time.

    The clocks of workers differ by some milliseconds, so the time of an event may be before that of an earlier one.
    """
    ordered: list[tuple[str, int, int, Entry]] = []
    latest = since
    for number, event in enumerate(events):
        latest = max(latest, event.at)
        ordered.append((latest, event.rank, number, event))
    ordered += [(each.at, each.rank, number, each) for number, each in enumerate(beside)]
    return [each[-1] for each in sorted(ordered, key=lambda each: each[:3])]


class Beside:
    """What has happened to the deliveries and attempts of a session."""

    def __init__(self, store: Store, session_id: str, policy: StreamPolicy) -> None:
        self._store = store
        self._session_id = session_id
        self._policy = policy

    async def time_after(self, index: int) -> str:
        """The time of this event: what follows it began then, or later."""
        found = await self._store.events(self._session_id, index, 1) if index >= 0 else ()
        return found[0].at if found else ""

    async def entries(self, since: str, until: str | None = None) -> tuple[list[Entry], bool]:
        """The entries from `since` on and before `until`, sorted; False if some are missing."""
        happened = await self._store.attempts.happened(self._session_id, since, until, _MOST)
        found = [each for row in happened.deliveries for each in _of_delivery(row)]
        found += [each for row, earlier in happened.attempts for each in self._of_attempt(row, earlier)]
        wanted = [each for each in found if since <= each.at and (until is None or each.at < until)]
        return merged((), wanted), happened.complete

    def _of_attempt(self, row: AttemptRow, earlier: Earlier | None) -> list[Entry]:
        at: JsonObject = place(row.session_id, row.key.turn, row.key.step)
        about: JsonObject = {"attemptId": row.attempt_id, **at, "scope": row.key.scope, "number": row.number}
        entries: list[Entry] = []
        if earlier is not None:
            reason = (earlier.error or {}).get("type", earlier.status)
            retried = {**at, "scope": row.key.scope, "after": earlier.attempt_id, "reason": reason}
            entries.append(Entry(row.started_at, BesideType.STEP_RETRYING, retried, rank=_AFTER))
        entries.append(Entry(row.started_at, BesideType.ATTEMPT_STARTED, {**about, "worker": row.worker}, rank=_AFTER))
        if row.ended_at is not None:
            error = error_of(row, self._policy)
            ended = {**about, "status": row.status, **({"error": error} if error else {})}
            # One that has ended in the millisecond in which it began comes after its own beginning.
            rank = _AFTER if row.ended_at == row.started_at else _BEFORE
            entries.append(Entry(row.ended_at, BesideType.ATTEMPT_ENDED, ended, rank=rank))
        return entries


def _of_delivery(row: DeliveryRow) -> list[Entry]:
    about: JsonObject = {"deliveryId": row.delivery_id, "kind": row.kind}
    entries = [Entry(row.accepted_at, BesideType.DELIVERY_QUEUED, about, rank=_BEFORE)]
    if row.started_at is not None and row.turn is not None:
        entries.append(
            Entry(
                row.started_at, BesideType.DELIVERY_CLAIMED, {**about, "turnId": names.turn_id(row.turn)}, rank=_AFTER
            )
        )
    return entries


class News:
    """What happens beside the events from some time on, each once."""

    def __init__(self, beside: Beside, since: str) -> None:
        self._beside = beside
        self._since = since
        self._told: dict[tuple[str, str], str] = {}

    async def next(self) -> list[Entry]:
        """What has happened, and was not told before. `tell` says what is told."""
        found, _ = await self._beside.entries(self._since)
        return [each for each in found if each.key not in self._told]

    def tell(self, entries: Sequence[Entry]) -> None:
        self._told |= {each.key: each.at for each in entries}
        if self._told:
            # Processes whose clocks differ may still write what is a little older.
            latest = max(self._told.values())
            self._since = max(self._since, before(latest, _LATE))
            self._told = {key: at for key, at in self._told.items() if at >= self._since}


class _Pauses:
    """Says of events in order where a turn pauses, and where it goes on."""

    def __init__(self, parked: int | None) -> None:
        """`parked`: the turn that waits for people before the first event."""
        self._parked = parked
        self._asked: int | None = None

    def with_event(self, event: Event) -> list[Entry]:
        """The event, and what it means for its turn."""
        entries = [of_event(event)]
        match event.type:
            case EventType.SESSION_ATTENTION:
                entries.append(self._entry(event, BesideType.TURN_PAUSED, None, reason=_code(event)))
            case EventType.SESSION_RECOVERED:
                entries.append(self._entry(event, BesideType.TURN_RESUMED, None, reason=_code(event)))
            case EventType.TURN_COMPLETED if event.turn is not None and self._asked == event.turn:
                self._parked = event.turn
                entries.append(self._entry(event, BesideType.TURN_PAUSED, event.turn, reason="input"))
            case EventType.TURN_STARTED if self._parked is not None and event.turn is not None:
                by = names.turn_id(event.turn)
                entries.append(self._entry(event, BesideType.TURN_RESUMED, self._parked, reason="input", by=by))
                self._parked = None
            case EventType.TURN_CANCELLED:
                self._parked = None
            case _:
                pass
        # A turn parks with the requests right before its end.
        self._asked = event.turn if event.type == EventType.INPUT_REQUESTED else None
        return entries

    def _entry(self, event: Event, type: str, turn: int | None, **data: str) -> Entry:
        of_turn = {} if turn is None else {"turnId": names.turn_id(turn)}
        return Entry(event.at, type, {**of_turn, **data})


def _code(event: Event) -> str:
    return str((event.data or {}).get("code", ""))


async def _parked_turn(store: Store, session_id: str, index: int) -> int | None:
    """The turn that waits for people after this event."""
    types = (EventType.TURN_STARTED, EventType.TURN_COMPLETED, EventType.TURN_CANCELLED, EventType.TURN_FAILED)
    query = EventQuery(before=index + 1, types=types, back=True, limit=1)
    found = await store.find_events(session_id, query) if index >= 0 else ()
    if not found or found[0].type != EventType.TURN_COMPLETED or found[0].index == 0:
        return None
    [asked] = await store.events(session_id, found[0].index - 1, 1)
    return found[0].turn if asked.type == EventType.INPUT_REQUESTED and asked.turn == found[0].turn else None


def of_event(event: Event) -> Entry:
    """The event without what was said."""
    data = event.data or {}
    shown: dict[str, Any] = {name: data[name] for name in ("turnId", "stepIndex", *_PLAIN) if name in data}
    if event.type in _OF_PROGRESS:
        # Of a plan the ids of the steps that have changed, not their titles.
        shown |= {name: data[name] for name in ("changed", "checkpointId", "name", "planStep") if data.get(name)}
    if event.type == EventType.ACTIONS_REQUESTED:
        shown["actions"] = [_call(each) for each in data.get("actions") or ()]
    if event.type == EventType.ACTION_RESULT:
        shown |= _call(data.get("result") or {})
    if event.type == EventType.INPUT_REQUESTED:
        shown["requestIds"] = [each.get("requestId") for each in data.get("requests") or ()]
    if event.delivery_ids:
        shown["deliveryIds"] = list(event.delivery_ids)
    if event.attempt is not None:
        shown["number"] = event.attempt
    return Entry(event.at, event.type, shown, event.index)


def _call(action: JsonObject) -> JsonObject:
    return {name: action[name] for name in ("callId", "toolName", "subagentName", "name") if name in action}
