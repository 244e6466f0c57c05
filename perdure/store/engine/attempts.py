"""Reports of attempts: the steps of a commit that write them, and the queries of those who look at them."""

import json
from collections.abc import Callable, Sequence

from perdure.errors import Invalid
from perdure.protocol import names
from perdure.protocol.events import DELTAS, EventType, NewEvent, Usage, read_data
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import (
    AttemptKey,
    AttemptPage,
    AttemptQuery,
    AttemptReport,
    AttemptRow,
    AttemptStatus,
    Backlog,
    Earlier,
    Happened,
)
from perdure.store.values import Attempt, Commit, Fence, Hold, Partial

from . import rows
from .cursors import NEWEST, Place, oldest_first, packed, unpacked, write_cursor
from .database import Database, Row, Transaction, Value
from .rows import before, decode_some, encode, encode_some, stamp_after, stamp_of

#: A number that no turn reaches: up to it, all turns are meant.
_AFTER_ALL_TURNS = 2**31 - 1

#: Seconds of the lease of an attempt that does not say how long it has one.
_LEASE = 5.0

_LEASE_EXPIRED: JsonObject = {
    "type": "LEASE_EXPIRED",
    "message": "lease expired; its turn ended before another one took over",
}
_TURN_ENDED: JsonObject = {"type": "TURN_ENDED", "message": "its turn ended before it did"}
_TURN_CANCELLED: JsonObject = {"type": "TURN_CANCELLED", "message": "its turn was cancelled"}
#: Of an attempt that lost its fence to an older version, which does not know this table: read, and never written.
_TAKEN_OVER_SILENTLY: JsonObject = {
    "type": "SUPERSEDED",
    "message": "it holds its fence no more; an older version has ended it",
}


# --- with commits -------------------------------------------------------------------------------------------


async def begin(tx: Transaction, commit: Commit, fence: Fence, now: str, *, replaces: bool) -> None:
    """Note that this attempt has taken the scope, from an older one if it `replaces` one."""
    attempt, place = fence.attempt, _key_columns(commit.session_id, fence.key)
    if replaces:
        by = f"taken over by {attempt.worker}" if attempt.number else "taken over by a rebuild of its session"
        expired = {"type": "LEASE_EXPIRED", "message": f"lease expired; {by}"}
        taken = {"type": "SUPERSEDED", "message": by}
        await tx.run("supersede_attempts", **place, now=now, expired=encode(expired), taken=encode(taken))
    # Number 0 only closes the scope, and nobody works in a turn that this commit ends.
    if attempt.number == 0 or commit.close or commit.close_turn == fence.turn:
        return
    await tx.run(
        "insert_attempt",
        **place,
        number=attempt.number,
        attempt_id=names.attempt_id(commit.session_id, fence.turn, fence.step, fence.scope, attempt.generation),
        worker=rows.printable(attempt.worker),
        lease_expires_at=_lease(attempt, now),
        now=now,
    )


def _lease(attempt: Attempt, now: str) -> str:
    if attempt.lease_until is None:
        return stamp_after(now, _LEASE)
    return stamp_of(attempt.lease_until)


async def recovery(tx: Transaction, commit: Commit) -> tuple[NewEvent | None, Partial | None]:
    """The event of a takeover, with how far the step had come and what is done about it, and what it goes on with."""
    superseding = commit.superseding
    if superseding is None:
        return None, None
    # Read in the transaction that raises the fence: from here on no older attempt adds to it.
    prefix = names.step_key(superseding.turn or 0, superseding.step or 0, "g")
    keys: dict[str, Value] = {"first": prefix, "until": f"{prefix[:-1]}h"}
    if commit.continuing is not None:
        partial = _partial(await tx.rows("pieces", session_id=commit.session_id, **keys))
        if partial is not None:
            return _recovered(commit.continuing, "provider_started", "continue"), partial
    if await tx.row("has_pieces", session_id=commit.session_id, **keys) is not None:
        return _recovered(superseding, "provider_started", "retract"), None
    return _recovered(superseding, "before_provider", "ask"), None


def _recovered(event: NewEvent, phase: str, decision: str) -> NewEvent:
    return event.model_copy(update={"data": {**(event.data or {}), "phase": phase, "decision": decision}})


def _partial(pieces: Sequence[Row]) -> Partial | None:
    """What was streamed of a reply and not retracted; None if it cannot be continued."""
    retractions = [index for index, piece in enumerate(pieces) if piece["type"] == EventType.STEP_SUPERSEDED]
    texts: dict[str, list[str]] = {type: [] for type in DELTAS}
    for piece in pieces[retractions[-1] + 1 if retractions else 0 :]:
        type = piece["type"]
        if type not in DELTAS:
            # A call: what was streamed of its arguments is no JSON that a model could go on with.
            return None
        texts[type].append((read_data(type, decode_some(piece["data"])) or {}).get(DELTAS[type][0], ""))
    text = "".join(texts[EventType.MESSAGE_APPENDED])
    # Providers refuse messages that are blank.
    return Partial(text, "".join(texts[EventType.REASONING_APPENDED])) if text.strip() else None


async def note(tx: Transaction, commit: Commit, now: str) -> None:
    """Note what this commit says of its attempt: its end, and what it has used."""
    report = _report(commit)
    if report is None:
        return
    usage = (commit.change and commit.change.usage) or Usage()
    if report.status is not None or usage != Usage():
        cost = commit.change.cost if commit.change else 0
        await _write(tx, commit.session_id, report.key, report.status, report.error, now, usage, cost)


async def note_lost(tx: Transaction, commit: Commit, now: str) -> None:
    """Note that the attempt finds its work done by another one. Nothing else of its commit is written.

    If it was itself, and did not see its first commit succeed, its end is noted already.
    """
    if commit.fence is not None and commit.fence.hold is Hold.RELEASE:
        lost = {"type": "SUPERSEDED", "message": "another attempt was faster"}
        await _write(tx, commit.session_id, commit.fence.key, "superseded", lost, now)


def _report(commit: Commit) -> AttemptReport | None:
    fence = commit.fence
    if commit.report is not None or fence is None or fence.hold is Hold.RAISE:
        return commit.report
    return fence.report("succeeded" if fence.hold is Hold.RELEASE else None)


async def _write(
    tx: Transaction,
    session_id: str,
    key: AttemptKey,
    status: AttemptStatus | None,
    error: JsonObject | None,
    now: str,
    usage: Usage | None = None,
    cost: int = 0,
) -> None:
    await tx.run(
        "report_attempt",
        **_key_columns(session_id, key),
        status=status,
        error=encode_some(error),
        **rows.tokens(usage or Usage()),
        cost=cost,
        now=now,
    )


async def end_all(tx: Transaction, commit: Commit, now: str) -> None:
    """End the attempts of a turn, or of a session, that ends here."""
    if commit.close:
        last = _AFTER_ALL_TURNS
    elif commit.close_turn is not None:
        last = commit.close_turn
    else:
        return
    cancelled = any(event.type == EventType.TURN_CANCELLED for event in commit.events)
    await tx.run(
        "end_attempts",
        session_id=commit.session_id,
        turn=last,
        cancelled=int(cancelled),
        expired=encode(_LEASE_EXPIRED),
        ended=encode(_TURN_CANCELLED if cancelled else _TURN_ENDED),
        now=now,
    )


def _key_columns(session_id: str, key: AttemptKey) -> dict[str, Value]:
    return {
        "session_id": session_id,
        "turn": key.turn,
        "step": key.step,
        "scope": key.scope,
        "generation": key.generation,
    }


# --- for those who look -------------------------------------------------------------------------------------


def attempt(row: Row) -> AttemptRow:
    # The fence decides who works: an older version raises it without a note in the row of the attempt before.
    runs, holds = row["status"] == "running", row["held"] == row["generation"]
    return AttemptRow(
        session_id=row["session_id"],
        key=AttemptKey(row["turn"], row["step"], row["scope"], row["generation"]),
        number=row["number"],
        attempt_id=row["attempt_id"],
        worker=row["worker"],
        started_at=row["started_at"],
        lease_expires_at=row["lease_expires_at"],
        status="superseded" if runs and not holds else row["status"],
        ended_at=row["ended_at"],
        error=_TAKEN_OVER_SILENTLY if runs and not holds else decode_some(row["error"]),
        usage=rows.usage(row),
        cost=row["cost"],
    )


class SqlAttempts:
    """`AttemptStore` over one `Database`."""

    def __init__(self, database: Database, clock: Callable[[], str]) -> None:
        self._database = database
        self._now = clock

    async def renew(self, session_id: str, key: AttemptKey, seconds: float) -> None:
        until = stamp_after(self._now(), seconds)
        values = {**_key_columns(session_id, key), "lease_expires_at": until}
        await self._database.write(lambda tx: tx.run("renew_attempt", **values))

    async def report(self, session_id: str, report: AttemptReport) -> None:
        await self._database.write(
            lambda tx: _write(tx, session_id, report.key, report.status, report.error, self._now())
        )

    async def list(self, query: AttemptQuery) -> AttemptPage:
        turn, step, scope, number = _read_cursor(query.cursor)
        found = await self._rows(
            "attempts_of_session",
            session_id=query.session_id,
            first=0 if query.turn is None else query.turn,
            last=_AFTER_ALL_TURNS if query.turn is None else query.turn,
            turn=turn,
            step=step,
            scope=scope,
            number=number,
            limit=query.limit + 1,
        )
        return _page(found, query.limit, lambda last: _write_cursor(last))

    async def leases(self, limit: int, cursor: str | None = None) -> AttemptPage:
        after = oldest_first(cursor)
        found = await self._rows("leases", started_at=after.at, attempt_id=after.id, limit=limit + 1)
        return _page(found, limit, lambda last: write_cursor(Place(last.started_at, last.attempt_id)))

    async def backlog(self, most: int) -> Backlog:
        found = await self._database.read(lambda tx: tx.rows("backlog", most=most))
        counts: dict[str, int] = {row["what"]: row["number"] for row in found}
        sessions = {status: counts[status] for status in ("starting", "running", "waiting")}
        return Backlog(sessions, counts["in_need"], counts["inputs"], counts["deliveries"])

    async def happened(self, session_id: str, since: str, until: str | None, limit: int) -> Happened:
        time: dict[str, Value] = {"since": since, "until": until or NEWEST.at, "limit": limit + 1}

        async def work(tx: Transaction) -> Happened:
            attempts = await tx.rows("attempts_between", session_id=session_id, **time)
            deliveries = await tx.rows("deliveries_between", session_id=session_id, **time)
            return Happened(
                [(attempt(row), _earlier(row)) for row in attempts[:limit]],
                [rows.delivery(row) for row in deliveries[:limit]],
                len(attempts) <= limit and len(deliveries) <= limit,
            )

        return await self._database.read(work)

    async def forget(self, older_than: float, limit: int) -> int:
        then = before(self._now(), older_than)
        return len(await self._database.write(lambda tx: tx.rows("forget_attempts", before=then, limit=limit)))

    async def _rows(self, query: str, **values: Value) -> Sequence[AttemptRow]:
        return [attempt(row) for row in await self._database.read(lambda tx: tx.rows(query, **values))]


def _earlier(row: Row) -> Earlier | None:
    if row["before_id"] is None:
        return None
    return Earlier(row["before_id"], row["before_status"], decode_some(row["before_error"]))


def _page(found: Sequence[AttemptRow], limit: int, cursor: Callable[[AttemptRow], str]) -> AttemptPage:
    if len(found) <= limit:
        return AttemptPage(found)
    return AttemptPage(found[:limit], cursor(found[limit - 1]))


def _write_cursor(last: AttemptRow) -> str:
    return packed(json.dumps([last.key.turn, last.key.step, last.key.scope, last.number]))


def _read_cursor(cursor: str | None) -> tuple[int, int, str, int]:
    """The place after which a page begins."""
    match (-1, 0, "", 0) if cursor is None else unpacked(cursor):
        case [int(turn), int(step), str(scope), int(number)] if all(abs(each) < 2**53 for each in (turn, step, number)):
            return turn, step, scope, number
        case _:
            raise Invalid("The cursor is not one that this server gave out.")
