"""What can be seen from outside: the store's own rows, the ledger, the provider's book, the streams."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Json = dict[str, Any]

#: How long a worker that wakes up may take to do what it was about to do.
_WAKING = 3.0

_TABLES = {
    "sessions": "SELECT * FROM sessions ORDER BY session_id",
    "events": "SELECT * FROM events ORDER BY session_id, idx",
    "records": "SELECT * FROM records ORDER BY session_id, turn, step, slot",
    "deliveries": "SELECT * FROM deliveries ORDER BY session_id, accepted_at, delivery_id",
    "fences": "SELECT * FROM fences ORDER BY session_id",
    "attempts": "SELECT * FROM attempts ORDER BY session_id, turn, step, scope, number",
    "inputs": "SELECT * FROM inputs ORDER BY session_id, opened_at, request_id",
    "deletions": "SELECT * FROM deletions ORDER BY session_id",
    "others": """
        SELECT session_id FROM slots UNION SELECT session_id FROM slot_versions UNION SELECT session_id FROM slot_steps
        UNION SELECT session_id FROM routes UNION SELECT session_id FROM dead_letters
    """,
}

#: Small answers, for those who ask again and again: all rows take seconds once there are thousands of sessions.
_MOVING = {
    "sessions": "SELECT session_id FROM sessions WHERE status IN ('starting', 'running')",
    "deliveries": "SELECT delivery_id FROM deliveries WHERE turn IS NULL AND refused IS NULL",
    "due": """
        SELECT delivery_id FROM deliveries WHERE turn IS NULL AND refused IS NULL
        AND session_id NOT IN (SELECT session_id FROM inputs WHERE status = 'open')
    """,
    "asking": "SELECT request_id FROM inputs WHERE status = 'open'",
    # What Temporal deletes takes as long as its queues are; that is begun once no row is left.
    "deletions": """
        SELECT session_id FROM deletions WHERE finished_at IS NULL AND counts NOT LIKE '%"executions"%'
    """,
    "events": "SELECT sum(next_index) AS told FROM sessions",
}


@dataclass(frozen=True)
class Asked:
    """One request that reached the provider."""

    #: Which message it answers, and how many steps into the turn.
    said: str
    step: int
    results: str
    at: float
    #: The beginning of its reply, if the provider was asked to go on with it.
    begun: str | None = None
    #: What it told the model beside the conversation.
    instructions: str = ""


@dataclass(frozen=True)
class Try:
    """One request of a caller over HTTP, and what became of it. Times are seconds since the epoch."""

    began: float
    ended: float
    #: None: there was no answer, for the reason that `problem` names.
    status: int | None
    problem: Literal["", "timeout", "refused", "broken"] = ""
    code: str = ""
    session_id: str = ""
    delivery_id: str | None = None
    #: The receipt says that Temporal has not been signalled yet.
    delayed: bool = False
    #: The status of the requests that it answered: id, status, option.
    outcomes: tuple[tuple[str, str, str | None], ...] = ()

    @property
    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True)
class Post:
    """What a caller wants delivered: one idempotency key, however often it is tried."""

    kind: Literal["create", "message", "answer", "compact", "clear"]
    key: str
    #: Empty when it starts a session.
    session_id: str
    message: str = ""
    #: What the model returns in the end, if it is not stopped.
    answer: str = ""
    tries: list[Try] = field(default_factory=list[Try])

    @property
    def accepted(self) -> Try | None:
        """The first receipt."""
        return next((each for each in self.tries if each.accepted), None)


@dataclass(frozen=True)
class Cancel:
    """A cancel request of a session, and the answer: `accepted`, `no_active_turn`, or none."""

    session_id: str
    tried: Try
    status: str | None


@dataclass(frozen=True)
class Fork:
    """A fork that a caller wants, at this turn and perhaps this step: one idempotency key, however often tried."""

    parent: str
    place: Json
    key: str
    #: Whether the refusal of another place has offered this one.
    offered: bool = False
    tries: list[Try] = field(default_factory=list[Try])


@dataclass(frozen=True)
class Deletion:
    """A session that a caller wants deleted."""

    session_id: str
    tries: list[Try] = field(default_factory=list[Try])

    @property
    def accepted(self) -> bool:
        return any(tried.accepted for tried in self.tries)


@dataclass(frozen=True)
class Absence:
    """A time in which workers could act or receive, but not both: frozen, or cut off from what they need."""

    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class Evidence:
    """Everything a run left behind, of all sessions that the store knows."""

    sessions: Sequence[Json]
    events: Mapping[str, Sequence[Json]]
    records: Mapping[str, Sequence[Json]]
    deliveries: Mapping[str, Sequence[Json]]
    fences: Sequence[Json] = ()
    #: What is reported of the attempts, by session.
    attempts: Mapping[str, Sequence[Json]] = field(default_factory=dict[str, Sequence[Json]])
    #: What people were asked, and how it was closed.
    inputs: Mapping[str, Sequence[Json]] = field(default_factory=dict[str, Sequence[Json]])
    effects: Sequence[Json] = ()
    asked: Sequence[Asked] = ()
    #: Requests that the provider refused because calls and results did not pair.
    unpaired: Sequence[str] = ()
    #: What readers of the streams were given, by session.
    streams: Mapping[str, Sequence[Json]] = field(default_factory=dict[str, Sequence[Json]])
    #: What callers got receipts for: session and delivery.
    receipts: Sequence[tuple[str, str]] = ()
    #: What callers did over HTTP, try by try.
    posts: Sequence[Post] = ()
    cancels: Sequence[Cancel] = ()
    forks: Sequence[Fork] = ()
    deletions: Sequence[Deletion] = ()
    #: What is left of deleted sessions, and the sessions with rows in tables that no other check looks at.
    tombstones: Mapping[str, Json] = field(default_factory=dict[str, Json])
    with_other_rows: Sequence[str] = ()
    #: What readers were given while it happened, each from index 0 on: session and events.
    followed: Sequence[tuple[str, Sequence[Json]]] = ()
    #: When workers that were taken for dead may have acted all the same.
    absences: Sequence[Absence] = ()

    def of_those_that_stay(self) -> "Evidence":
        """Without what callers did with sessions that somebody wanted deleted: nothing can be known of that."""
        gone = {each.session_id for each in self.deletions}

        def stays(post: Post) -> bool:
            return not gone & {post.session_id, *(tried.session_id for tried in post.tries)}

        return replace(
            self,
            posts=[post for post in self.posts if stays(post)],
            cancels=[cancel for cancel in self.cancels if cancel.session_id not in gone],
            followed=[(session_id, events) for session_id, events in self.followed if session_id not in gone],
            receipts=[receipt for receipt in self.receipts if receipt[0] not in gone],
        )

    def of_single_sessions(self) -> "Evidence":
        """Without sessions that have handed work on, and without those that did it."""
        called = {
            session_id: {event["data"]["childSessionId"] for event in events if event["type"] == "subagent.called"}
            for session_id, events in self.events.items()
        }
        members = {session_id for session_id, children in called.items() if children}.union(*called.values())

        def others(rows: Mapping[str, Sequence[Json]]) -> dict[str, Sequence[Json]]:
            return {session_id: each for session_id, each in rows.items() if session_id not in members}

        return replace(
            self,
            sessions=[session for session in self.sessions if session["session_id"] not in members],
            events=others(self.events),
            records=others(self.records),
            deliveries=others(self.deliveries),
            inputs=others(self.inputs),
            receipts=[receipt for receipt in self.receipts if receipt[0] not in members],
        )

    def may_be_late(self, at: float, *kinds: str) -> bool:
        """Whether a worker that was absent, for one of these reasons if any are given, may have acted only then."""
        return any(
            each.began <= at <= each.ended + _WAKING and (not kinds or each.kind in kinds) for each in self.absences
        )


@dataclass(frozen=True)
class Moving:
    """What has not settled: sessions that work, and deliveries that are neither consumed nor refused."""

    sessions: Sequence[str]
    deliveries: Sequence[str]
    #: Sessions of which rows are left although they are being deleted.
    deletions: Sequence[str]
    #: Those deliveries whose sessions do not wait for an answer.
    due: Sequence[str]
    #: The requests that wait for an answer.
    asking: Sequence[str]
    #: How many events there are in all.
    emitted: int

    @property
    def unsettled(self) -> list[str]:
        return [*self.sessions, *self.deliveries, *self.deletions]


def read_moving(database_url: str) -> Moving:
    """What still moves, with plain SQL."""
    tables = _tables(database_url, _MOVING)
    [[total]] = [row.values() for row in tables["events"]]
    sessions, deliveries, deletions, due, asking = (
        [str(value) for row in tables[name] for value in row.values()]
        for name in ("sessions", "deliveries", "deletions", "due", "asking")
    )
    return Moving(sessions, deliveries, deletions, due, asking, int(total or 0))


def read_store(database_url: str) -> Evidence:
    """The rows as they are, with plain SQL: the product's own code is not asked about itself."""
    tables = _tables(database_url, _TABLES)
    events = _by_session(_decoded(each, "data", "delivery_ids") for each in tables["events"])
    return Evidence(
        sessions=tables["sessions"],
        events=events,
        records=_own_records(_by_session(_decoded(each, "body") for each in tables["records"]), events),
        deliveries=_by_session(tables["deliveries"]),
        fences=tables["fences"],
        attempts=_by_session(tables["attempts"]),
        inputs=_by_session(_decoded(each, "request", "answer") for each in tables["inputs"]),
        tombstones={row["session_id"]: row for row in tables["deletions"]},
        with_other_rows=[row["session_id"] for row in tables["others"]],
    )


def _own_records(records: Mapping[str, Sequence[Json]], events: Mapping[str, Sequence[Json]]) -> dict[str, list[Json]]:
    """The records of turns that the session ran itself: a fork may have those of turns that it shares as well."""
    shared = {
        session_id: event["data"]["parent"]["turn"]
        for session_id, each in events.items()
        for event in each[:1]
        if event["type"] == "session.forked"
    }
    return {
        session_id: [record for record in each if record["turn"] > shared.get(session_id, -1)]
        for session_id, each in records.items()
    }


def _tables(database_url: str, queries: Mapping[str, str]) -> dict[str, list[Json]]:
    """The answers of all queries, as they were at one moment."""
    read = _sqlite if database_url.startswith("sqlite") else _postgres
    return read(database_url, queries)


def _sqlite(database_url: str, queries: Mapping[str, str]) -> dict[str, list[Json]]:
    database = sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
    try:
        database.row_factory = sqlite3.Row
        database.execute("BEGIN")
        return {name: [dict(row) for row in database.execute(query)] for name, query in queries.items()}
    finally:
        database.close()


def _postgres(database_url: str, queries: Mapping[str, str]) -> dict[str, list[Json]]:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(database_url) as database, database.cursor(row_factory=dict_row) as cursor:
        database.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return {name: cursor.execute(query.encode()).fetchall() for name, query in queries.items()}


def _decoded(row: Json, *columns: str) -> Json:
    return {**row, **{column: json.loads(row[column]) for column in columns if row[column] is not None}}


def _by_session(rows: Iterable[Json]) -> dict[str, list[Json]]:
    grouped: dict[str, list[Json]] = defaultdict(list)
    for row in rows:
        grouped[row["session_id"]].append(row)
    return dict(grouped)
