"""The commit: the steps of `Commit` inside one transaction. The same code runs on every database."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perdure.errors import BudgetReached, StoreBehind, Superseded, TokenConflict, TurnCancelled, Unavailable
from perdure.protocol import names
from perdure.protocol.events import BOUNDARIES, TERMINAL, EventType, NewEvent, Usage
from perdure.protocol.inputs import InputAnswer, InputStatus
from perdure.store.deliveries import CancelRequest
from perdure.store.values import (
    AlreadyBegun,
    Commit,
    Committed,
    DeliveryTaken,
    Hold,
    Partial,
    Record,
    SessionChange,
    SessionRow,
    SlotConflict,
    Steered,
)

from . import attempts, queue, rows, runs
from .database import Transaction, Value, Work, Written
from .deliveries import end_lanes, expects_turn, has_unread, refuse_unread, report_end, report_inputs
from .history import checkpoints
from .history.slots import write_slot
from .rows import LockedSession, encode, encode_some, lock


async def apply(tx: Transaction, commit: Commit, now: str) -> Written[Committed]:
    """Execute the commit, or raise; the caller then rolls the transaction back."""
    session = await lock(tx, commit.session_id)
    _check_read(commit, session.row)
    if commit.unless and (existing := await record_at(tx, commit.session_id, *commit.unless)) is not None:
        # Another attempt has won.
        await attempts.note_lost(tx, commit, now)
        return Written(Committed(session.row, existing=existing))
    if session.closed_at is not None and _extends(commit) and not commit.late:
        if commit.close and commit.fence is None:
            return Written(Committed(session.row))
        raise Superseded("The session has ended.")
    await _check_wanted(tx, commit, session.row)
    await _check_unbegun(tx, commit)
    superseded = await _apply_fence(tx, commit, now)
    await attempts.note(tx, commit, now)
    await _reserve(tx, commit)
    attempt = commit.fence.attempt.number if commit.fence else None
    for record in commit.records:
        await tx.run("insert_record", **rows.new_record(commit.session_id, record, attempt, now))
    await _consume(tx, commit, session.row, now)
    partial: Partial | None = None
    if superseded:
        event, partial = await attempts.recovery(tx, commit)
        commit = replace(commit, superseding=event)
    events, last = _split_terminal(commit, superseded)
    events = await _settled(tx, commit.session_id, events, now)
    if commit.close:
        # What is left was read by a turn whose records nobody can read.
        last = [await _settle(tx, commit.session_id, each, _LAST, "failed", now) for each in last]
    log_head = session.row.events

    async def append(events: Sequence[NewEvent]) -> None:
        nonlocal log_head
        log_head = await rows.append(tx, commit.session_id, log_head, events, now)

    # Readers of a turn stop at its boundary, and its checkpoint is of this turn.
    boundary = events[-1:] if commit.checkpoint and events and events[-1].type in BOUNDARIES else ()
    await append([*_recovery_event(commit, session.row), *events[: len(events) - len(boundary)]])
    await _keep_failed_turns(tx, session.row, events, now)
    await _write_slots(tx, commit, session.row)
    if commit.checkpoint is not None:
        await append([*await checkpoints.take(tx, session.row, commit.checkpoint, now), *boundary])
    await _write_route(tx, commit, session)
    await _close(tx, commit, now)
    await _lock_above(tx, commit, session.row)
    await append(await _change_inputs(tx, commit, session, now))
    if commit.close:
        await append(await refuse_unread(tx, commit.session_id, now))
        await report_end(tx, session.row, now)
        await end_lanes(tx, session.row, now)
        await tx.run("begin_callback", session_id=commit.session_id, now=now)
    await append(last)
    # After all sessions: who holds an account waits for no session.
    await _spend(tx, commit)
    # A cancel request that has stopped nothing stays open for the turn that reads the waiting deliveries.
    settles = commit.close or (commit.settles_cancel and not await expects_turn(tx, commit.session_id))
    row = _updated(replace(session.row, events=log_head, updated_at=now), commit, settles)
    closed_at = session.closed_at or (now if commit.close else None)
    if row.run is not None and commit.close:
        await runs.end_run(tx, row, commit.run, now)
    elif commit.run is not None:
        await runs.change_run(tx, commit.session_id, commit.run)
    await tx.run("update_session", **rows.read_model(row), closed_at=closed_at)
    done = Committed(row, superseded=superseded, partial=partial)
    return Written(done, log_head if log_head > session.row.events else None)


async def _check_wanted(tx: Transaction, commit: Commit, row: SessionRow) -> None:
    """Raise if the work is no longer wanted: its turn was cancelled, or a message is to enter it first."""
    turn, cancelled = commit.unless_cancelled, row.cancel_turn
    if turn is not None and cancelled is not None and cancelled <= turn:
        raise TurnCancelled(turn=turn)
    if commit.unless_steered and await queue.is_steered(tx, row):
        raise Steered


def _check_read(commit: Commit, row: SessionRow) -> None:
    """Raise if what the caller has read cannot be true, or is not true any more."""
    if commit.head is not None and row.events < commit.head:
        raise StoreBehind(events=row.events, expected=commit.head)
    changed = commit.current and commit.head != row.events
    if changed or (commit.left_out is not None and list(commit.left_out) != list(row.left_out)):
        raise Unavailable("The session has changed since it was read.")


async def _check_unbegun(tx: Transaction, commit: Commit) -> None:
    for key in commit.without:
        if await record_at(tx, commit.session_id, *key) is not None:
            raise AlreadyBegun
    if commit.if_idle and await has_unread(tx, commit.session_id):
        raise AlreadyBegun


async def record_at(tx: Transaction, session_id: str, turn: int, step: int, key: str) -> Record | None:
    found = await tx.row("record", session_id=session_id, turn=turn, step=step, slot=key)
    return None if found is None else rows.record(found)


def _extends(commit: Commit) -> bool:
    """Whether the commit adds something to the session. A closed session accepts no more."""
    return bool(commit.records or commit.events or commit.consume or commit.inputs.opens or commit.change)


async def _apply_fence(tx: Transaction, commit: Commit, now: str) -> bool:
    """Raise, check or release the fence. True when it was taken from an older attempt."""
    fence = commit.fence
    if fence is None:
        return False
    place = {"session_id": commit.session_id, "turn": fence.turn, "step": fence.step, "scope": fence.scope}
    found = await tx.row("fence", **place)
    current: int | None = None if found is None else found["generation"]
    mine = fence.attempt.generation
    match fence.hold:
        case Hold.RAISE:
            if current is not None and current > mine:
                raise Superseded
            await tx.run("raise_fence", **place, attempt=fence.attempt.number, generation=mine)
            if current != mine:
                await attempts.begin(tx, commit, fence, now, replaces=found is not None)
            # Number 0 only closes the scope: no attempt has run, so none is superseded.
            return found is not None and current != mine and found["attempt"] > 0
        case Hold.KEEP | Hold.RELEASE:
            if current != mine:
                raise Superseded
            if fence.hold is Hold.RELEASE:
                await tx.run("delete_fence", **place)
            return False


async def _reserve(tx: Transaction, commit: Commit) -> None:
    """Reserve with the fence of an attempt; `BudgetReached` if it does not fit.

    The reservation is part of the fence, so it ends with it: when the attempt settles, when a newer attempt takes over,
    and when the turn or the session ends.
    """
    wanted, fence = commit.reserve, commit.fence
    if wanted is None or fence is None:
        return
    place = {"session_id": commit.session_id, "turn": fence.turn, "step": fence.step, "scope": fence.scope}
    if wanted.tokens or wanted.cost:
        await tx.run("open_account", account=wanted.account)
        # From here on no other session of this account reserves or settles before this transaction has ended.
        spent = await tx.row("lock_account", account=wanted.account)
        others = await tx.row("reserved", account=wanted.account, **place)
        assert spent is not None
        assert others is not None
        for unit, limit, more in (
            ("tokens", wanted.most_tokens, wanted.tokens),
            ("cost", wanted.most_cost, wanted.cost),
        ):
            used, reserved = spent[unit], others[unit]
            if limit is not None and used + reserved + more > limit:
                raise BudgetReached(unit=unit, used=used, reserved=reserved, wanted=more, limit=limit)
    await tx.run("reserve", account=wanted.account, tokens=wanted.tokens, cost=wanted.cost, **place)


async def _spend(tx: Transaction, commit: Commit) -> None:
    if commit.spends is not None:
        spent = commit.spends
        await tx.run("spend", account=spent.account, tokens=spent.tokens, cost=spent.cost)


def _split_terminal(commit: Commit, superseded: bool) -> tuple[Sequence[NewEvent], Sequence[NewEvent]]:
    """The events of the commit, and apart from them the one that ends the session: it must be the last."""
    events = [*([commit.superseding] if superseded and commit.superseding else []), *commit.events]
    if events and events[-1].type in TERMINAL:
        return events[:-1], events[-1:]
    return events, ()


def _shows_progress(commit: Commit) -> bool:
    """Whether the commit shows that a worker makes progress with the session."""
    fence = commit.fence
    # To enter the body of a run shows nothing: it may be about to stop where it did before.
    raises = fence is not None and fence.hold is Hold.RAISE and fence.scope != names.BODY_SCOPE
    return raises or commit.recovers or _ends_turn(commit)


def _ends_turn(commit: Commit) -> bool:
    return commit.close or (commit.change is not None and commit.change.status in ("waiting", "completed", "failed"))


def _recovery_event(commit: Commit, row: SessionRow) -> Sequence[NewEvent]:
    """The event for readers when the session needs attention no more."""
    if row.attention is None or not _shows_progress(commit):
        return ()
    key = names.session_key(f"attention/{row.attention['number']}/recovered")
    return (NewEvent(type=EventType.SESSION_RECOVERED, key=key, data={"code": row.attention["code"]}),)


async def _keep_failed_turns(tx: Transaction, row: SessionRow, events: Sequence[NewEvent], now: str) -> None:
    """Leave a dead letter for each turn that failed, whoever ended it."""
    for event in events:
        if event.type == EventType.TURN_FAILED:
            await tx.run("insert_dead_letter", **rows.new_dead_letter(row, event, now))


async def _consume(tx: Transaction, commit: Commit, row: SessionRow, now: str) -> None:
    if commit.consume is None:
        return
    if row.notes and commit.consume.notes:
        await checkpoints.drop_notes(tx, row, commit.consume.notes)
    wanted, turn = sorted(set(commit.consume.delivery_ids)), commit.consume.turn
    read = await tx.rows("hear_deliveries", session_id=commit.session_id, delivery_ids=wanted, turn=turn, now=now)
    if len(read) < len(wanted):
        taken = set(wanted) - {row["delivery_id"] for row in read}
        raise DeliveryTaken(*sorted(taken))
    if any(row["edits"] != commit.consume.edits.get(row["delivery_id"], row["edits"]) for row in read):
        raise Unavailable("A delivery was edited since it was read.")


#: After all turns.
_LAST = 2**31 - 1

#: The events that end a turn, and what becomes of the deliveries that it has read.
_OUTCOMES: Mapping[str, str] = {
    EventType.TURN_COMPLETED: "completed",
    EventType.TURN_FAILED: "failed",
    EventType.TURN_CANCELLED: "cancelled",
}


async def _settled(tx: Transaction, session_id: str, events: Sequence[NewEvent], now: str) -> Sequence[NewEvent]:
    """Settle the deliveries of a turn that ends, and of those that have parked before it; its last event names them."""
    parks = any(event.type == EventType.INPUT_REQUESTED for event in events)
    named: list[NewEvent] = []
    for event in events:
        if event.type == EventType.COMPACTION_FAILED:
            # Of a compaction that a caller has asked for. It was read in this transaction, and counts as completed.
            for each in event.delivery_ids:
                await tx.run("fail_delivery", session_id=session_id, delivery_id=each, error=_error_of(event), now=now)
        outcome = _OUTCOMES.get(event.type)
        if outcome is None or event.turn is None:
            named.append(event)
        elif outcome == "completed" and parks:
            # It has asked people: a later turn goes on with these deliveries, and settles them.
            named.append(event)
        else:
            named.append(await _settle(tx, session_id, event, event.turn, outcome, now))
    return named


def _error_of(event: NewEvent) -> str | None:
    data = event.data or {}
    return encode_some({name: data[name] for name in ("code", "message") if name in data} or None)


async def _settle(tx: Transaction, session_id: str, event: NewEvent, turn: int, outcome: str, now: str) -> NewEvent:
    """Settle what the turns up to this one have read; the event, with what it has settled."""
    answered_by = None if turn == _LAST else turn
    end = {"outcome": outcome, "now": now, "error": _error_of(event), "answered_by": answered_by}
    found = await tx.rows("settle_deliveries", session_id=session_id, turn=turn, **end)
    found = sorted(found, key=lambda row: (row["turn"], row["accepted_at"], row["delivery_id"]))
    ids = tuple(row["delivery_id"] for row in found)
    return event.model_copy(update={"delivery_ids": (*event.delivery_ids, *ids)}) if ids else event


async def _write_slots(tx: Transaction, commit: Commit, row: SessionRow) -> None:
    if not commit.slots:
        return
    # Only turns write slots, so this is the turn that runs. What it does for an earlier turn counts as its first step.
    turn = max(0, row.turns - 1, (commit.change.turns or 0) - 1 if commit.change else 0)
    step = max((record.step for record in commit.records if record.turn == turn), default=0)
    names = [write.name for write in commit.slots]
    found = await tx.rows("slots", session_id=commit.session_id, names=names)
    versions: dict[str, int] = {row["name"]: row["version"] for row in found}
    for write in commit.slots:
        # A slot that was never written has version 0.
        version = versions.get(write.name, 0)
        if write.expected is not None and write.expected != version:
            raise SlotConflict(write.name)
        versions[write.name] = version + 1
        written: dict[str, Value] = {"name": write.name, "value": encode(write.value), "version": version + 1}
        await write_slot(tx, commit.session_id, turn, step, written)


async def _write_route(tx: Transaction, commit: Commit, session: LockedSession) -> None:
    # A closed session owns no route. A late commit must not create one again.
    if commit.route is None or session.closed_at is not None:
        return
    await tx.run("delete_routes", session_id=commit.session_id)
    if await tx.row("insert_route", token_hash=commit.route, session_id=commit.session_id) is None:
        raise TokenConflict


async def _close(tx: Transaction, commit: Commit, now: str) -> None:
    await attempts.end_all(tx, commit, now)
    if commit.close:
        await tx.run("delete_routes", session_id=commit.session_id)
        await tx.run("delete_fences", session_id=commit.session_id)
    if commit.close_turn is not None:
        await tx.run("delete_fences_of_turn", session_id=commit.session_id, turn=commit.close_turn)


async def _lock_above(tx: Transaction, commit: Commit, row: SessionRow) -> None:
    """Lock what the commit changes above the session, from the parent up to the root, and count what was used there.

    Sessions are locked upwards everywhere, so that families never wait for each other in a circle.
    """
    if row.parent is None:
        return
    used = commit.change.usage if commit.change else None
    if commit.change is None or used is None or used == Usage():
        if commit.close and row.parent_id is not None and row.parent_id != row.root_id:
            # The reports of its requests lock the root, and that of its end locks the parent.
            await rows.find(tx, row.parent_id)
        return
    above = row.parent_id
    while above is not None:
        found = await tx.row("raise_below", session_id=above, cost=commit.change.cost, **rows.tokens(used))
        # If the one above was deleted alone, the root has to count all the same.
        beyond = row.root_id if above != row.root_id else None
        above = beyond if found is None else found["parent_id"]


def _updated(row: SessionRow, commit: Commit, settles: bool) -> SessionRow:
    change = commit.change or SessionChange()
    turns = max(row.turns, change.turns or 0)
    # The end of a turn settles the cancel request for it. A request for a later turn stays open.
    met = _ends_turn(commit) and row.cancel_turn is not None and row.cancel_turn < turns
    return replace(
        row,
        status=change.status or row.status,
        turns=turns,
        steps=row.steps + change.steps,
        tool_calls=row.tool_calls + change.tool_calls,
        usage=row.usage + change.usage if change.usage else row.usage,
        error=row.error if change.error is None else change.error,
        cancel_turn=None if settles or met else row.cancel_turn,
        attention=None if _shows_progress(commit) else row.attention,
    )


async def _change_inputs(tx: Transaction, commit: Commit, session: LockedSession, now: str) -> Sequence[NewEvent]:
    """Open, expire and withdraw requests as the commit says. Return the events of those that it closed."""
    changes = commit.inputs
    for request in changes.opens:
        if request.session_id != commit.session_id:
            raise ValueError("a commit opens requests of its own session only")
        await tx.run("open_input", **rows.new_input(request, session.row, now))
    closed = [
        each for each, answer in changes.expires.items() if await _close_input(tx, commit, each, "expired", answer, now)
    ]
    closed += [each for each in changes.withdraws if await _close_input(tx, commit, each, "withdrawn", None, now)]
    if commit.close:
        withdrawn = await tx.rows("withdraw_inputs", session_id=commit.session_id, now=now)
        closed += sorted(row["request_id"] for row in withdrawn)
    await report_inputs(tx, session.row, [each.request_id for each in changes.opens], "opened", now)
    await report_inputs(tx, session.row, closed, "closed", now)
    return [changes.resolved[each] for each in closed if each in changes.resolved]


async def _close_input(
    tx: Transaction, commit: Commit, request_id: str, status: InputStatus, answer: InputAnswer | None, now: str
) -> bool:
    """Close one request; False when it is closed already, or belongs to another session."""
    closed = await tx.row(
        "close_input",
        session_id=commit.session_id,
        request_id=request_id,
        status=status,
        answer=rows.answer_text(answer),
        now=now,
    )
    return closed is not None


# --- cancel requests ----------------------------------------------------------------------------------------


def cancelling(
    session_id: str, turn_id: str | None, to_event: Callable[[int], NewEvent], clock: Callable[[], str]
) -> Work[Written[CancelRequest | None]]:
    """The work that records a cancel request. It may be retried: that is about the turn of the first try."""
    chosen: list[tuple[int, NewEvent]] = []

    def event_of(turn: int) -> NewEvent:
        event = to_event(turn)
        chosen.append((turn, event))
        return event

    async def work(tx: Transaction) -> Written[CancelRequest | None]:
        if not chosen:
            return await cancel(tx, session_id, turn_id, event_of, clock())
        # The turn of the first try may have ended since, and the next one is not meant.
        turn, event = chosen[0]
        if await tx.row("index_of", session_id=session_id, key=event.key) is not None:
            return Written(CancelRequest(session_id, turn))
        return await cancel(tx, session_id, names.turn_id(turn), to_event, clock())

    return work


async def cancel(
    tx: Transaction, session_id: str, turn_id: str | None, to_event: Callable[[int], NewEvent], now: str
) -> Written[CancelRequest | None]:
    """Record a cancel request for the session's turn. The lock keeps the turn from ending meanwhile."""
    session = await rows.find(tx, session_id)
    turn = None if session is None else await _turn(tx, session)
    if session is None or turn is None or turn_id not in (None, names.turn_id(turn)):
        return Written(None)
    waiting = await tx.row("waiting", session_id=session_id) if turn == session.row.turns else None
    request = CancelRequest(session_id, turn, until=None if waiting is None else waiting["newest"])
    known = session.row.cancel_turn == turn
    if known and session.row.cancel_until == request.until:
        return Written(request)
    meant = rows.cancel_meant(turn, request.until)
    await tx.run("set_cancel", session_id=session_id, turn=turn, meant=meant)
    if known:
        return Written(request)
    return Written(request, await rows.emit(tx, session.row, (to_event(turn),), now))


async def _turn(tx: Transaction, session: LockedSession) -> int | None:
    """The turn that runs, waits for input, or is about to begin."""
    row = session.row
    if session.ended:
        return None
    match row.status:
        case "running":
            return max(0, row.turns - 1)
        case "starting":
            return row.turns
        case "waiting" if await tx.row("has_open_input", session_id=row.session_id) is not None:
            return max(0, row.turns - 1)
        case "waiting" if await expects_turn(tx, row.session_id):
            # A delivery waits, and no worker has begun its turn.
            return row.turns
        case _:
            return None
