"""The commit: what `Commit` promises, step by step, inside one transaction. The same code for every database."""

from collections.abc import Sequence
from dataclasses import replace

from perdure.errors import StoreBehind, Superseded, TokenConflict, TurnCancelled, Unavailable
from perdure.protocol import names
from perdure.protocol.events import TERMINAL, EventType, NewEvent
from perdure.protocol.inputs import InputAnswer, InputStatus
from perdure.store.values import (
    Begun,
    Commit,
    Committed,
    DeliveryTaken,
    Fence,
    Hold,
    Record,
    SessionChange,
    SessionRow,
    SlotConflict,
)

from . import log, rows
from .database import Told, Transaction
from .deliveries import expects_turn, refuse_unheard
from .log import LockedSession, lock
from .rows import encode


async def apply(tx: Transaction, commit: Commit, now: str) -> Told[Committed]:
    """Do all that the commit asks for, or raise and leave the transaction to be rolled back."""
    session = await lock(tx, commit.session_id)
    if commit.head is not None and session.row.events < commit.head:
        raise StoreBehind(events=session.row.events, expected=commit.head)
    if commit.current and commit.head != session.row.events:
        raise Unavailable("The session has changed since it was read.")
    if (existing := await _winner(tx, commit)) is not None:
        return Told(Committed(session.row, existing=existing))
    if session.closed_at is not None and _adds(commit):
        if commit.close and commit.fence is None:
            return Told(Committed(session.row))
        raise Superseded("The session is over.")
    _heed(commit, session.row)
    for key in commit.without:
        if await record_at(tx, commit.session_id, *key) is not None:
            raise Begun
    superseded = await _hold(tx, commit)
    await _record(tx, commit, now)
    events, last = _in_order(commit, superseded)
    log_head = session.row.events

    async def append(events: Sequence[NewEvent]) -> None:
        nonlocal log_head
        log_head = await log.append(tx, commit.session_id, log_head, events, now)

    await append([*_recovered(commit, session.row), *events])
    await _consume(tx, commit)
    await _write_slots(tx, commit)
    await _bind(tx, commit, session)
    await _close(tx, commit)
    if touches_inputs(commit):
        await append(await settle_inputs(tx, commit, session, now))
    if commit.close:
        await append(await refuse_unheard(tx, commit.session_id))
    await append(last)
    # A wish that has met nothing stays for the turn that reads what still waits.
    settles = commit.close or (commit.settles_cancel and not await expects_turn(tx, commit.session_id))
    row = _changed(replace(session.row, events=log_head, updated_at=now), commit, settles)
    closed_at = session.closed_at or (now if commit.close else None)
    await tx.run("update_session", **rows.read_model(row), closed_at=closed_at)
    return Told(Committed(row, superseded=superseded), log_head if log_head > session.row.events else None)


async def record_at(tx: Transaction, session_id: str, turn: int, step: int, slot: str) -> Record | None:
    found = await tx.row("record", session_id=session_id, turn=turn, step=step, slot=slot)
    return None if found is None else rows.record(found)


async def _winner(tx: Transaction, commit: Commit) -> Record | None:
    return None if commit.unless is None else await record_at(tx, commit.session_id, *commit.unless)


def _adds(commit: Commit) -> bool:
    """Whether the commit would go on with the session: nothing follows its end, whoever comes late."""
    return bool(commit.records or commit.events or commit.consume or commit.opens or commit.change)


def _heed(commit: Commit, row: SessionRow) -> None:
    """Stop where somebody wants the turn stopped: whatever begins or ends it in another way comes too late."""
    if commit.heeds is not None and row.cancel_turn is not None and row.cancel_turn <= commit.heeds:
        raise TurnCancelled(turn=commit.heeds)


async def _hold(tx: Transaction, commit: Commit) -> bool:
    """Raise, check or release the fence; True when it was taken from an older attempt."""
    fence = commit.fence
    if fence is None:
        return False
    place = _place(commit.session_id, fence)
    found = await tx.row("fence", **place)
    standing: int | None = None if found is None else found["generation"]
    mine = fence.attempt.generation
    match fence.hold:
        case Hold.RAISE:
            if standing is not None and standing > mine:
                raise Superseded
            await tx.run("raise_fence", **place, attempt=fence.attempt.number, generation=mine)
            # Nobody has shown anything where no attempt has begun.
            return found is not None and standing != mine and found["attempt"] > 0
        case Hold.KEEP | Hold.RELEASE:
            if standing != mine:
                raise Superseded
            if fence.hold is Hold.RELEASE:
                await tx.run("delete_fence", **place)
            return False


def _place(session_id: str, fence: Fence) -> dict[str, str | int]:
    return {"session_id": session_id, "turn": fence.turn, "step": fence.step, "scope": fence.scope}


def _in_order(commit: Commit, superseded: bool) -> tuple[Sequence[NewEvent], Sequence[NewEvent]]:
    """The events of the commit; one that ends the session is set apart, because nothing may follow it."""
    events = [*([commit.superseding] if superseded and commit.superseding else []), *commit.events]
    if events and events[-1].type in TERMINAL:
        return events[:-1], events[-1:]
    return events, ()


def _goes_on(commit: Commit) -> bool:
    """Whether the commit shows that some worker can go on with the session."""
    raises = commit.fence is not None and commit.fence.hold is Hold.RAISE
    return raises or commit.recovers or _ends_turn(commit)


def _ends_turn(commit: Commit) -> bool:
    return commit.close or (commit.change is not None and commit.change.status in ("waiting", "completed", "failed"))


def _recovered(commit: Commit, row: SessionRow) -> Sequence[NewEvent]:
    """What readers are told when a session needs no attention any more."""
    if row.attention is None or not _goes_on(commit):
        return ()
    key = names.session_key(f"attention/{row.attention['number']}/recovered")
    return (NewEvent(type=EventType.SESSION_RECOVERED, key=key, data={"code": row.attention["code"]}),)


async def _record(tx: Transaction, commit: Commit, now: str) -> None:
    attempt = commit.fence.attempt.number if commit.fence else None
    for record in commit.records:
        await tx.run("insert_record", **rows.new_record(commit.session_id, record, attempt, now))


async def _consume(tx: Transaction, commit: Commit) -> None:
    if not commit.consume:
        return
    if commit.consume_turn is None:
        raise ValueError("a commit that consumes deliveries must say for which turn")
    wanted = sorted(set(commit.consume))
    heard = await tx.rows(
        "hear_deliveries", session_id=commit.session_id, delivery_ids=wanted, turn=commit.consume_turn
    )
    if len(heard) < len(wanted):
        taken = set(wanted) - {row["delivery_id"] for row in heard}
        raise DeliveryTaken(*sorted(taken))


async def _write_slots(tx: Transaction, commit: Commit) -> None:
    if not commit.slots:
        return
    names = [write.name for write in commit.slots]
    found = await tx.rows("slots", session_id=commit.session_id, names=names)
    versions: dict[str, int] = {row["name"]: row["version"] for row in found}
    for write in commit.slots:
        # A slot that nobody wrote yet has version 0.
        version = versions.get(write.name, 0)
        if write.expected is not None and write.expected != version:
            raise SlotConflict(write.name)
        versions[write.name] = version + 1
        await tx.run(
            "write_slot",
            session_id=commit.session_id,
            name=write.name,
            value=encode(write.value),
            version=version + 1,
        )


async def _bind(tx: Transaction, commit: Commit, session: LockedSession) -> None:
    # A session that was closed owns no route any more; a late commit must not bring one back to life.
    if commit.route is None or session.closed_at is not None:
        return
    await tx.run("delete_routes", session_id=commit.session_id)
    if await tx.row("insert_route", token_hash=commit.route, session_id=commit.session_id) is None:
        raise TokenConflict


async def _close(tx: Transaction, commit: Commit) -> None:
    if commit.close:
        await tx.run("delete_routes", session_id=commit.session_id)
        await tx.run("delete_fences", session_id=commit.session_id)
    if commit.close_turn is not None:
        await tx.run("delete_fences_of_turn", session_id=commit.session_id, turn=commit.close_turn)


def _changed(row: SessionRow, commit: Commit, settles: bool) -> SessionRow:
    change = commit.change or SessionChange()
    turns = max(row.turns, change.turns or 0)
    # A turn that ends takes the wish to stop it along. A wish for a later turn stays, unless there will be none.
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
        attention=None if _goes_on(commit) else row.attention,
    )


def touches_inputs(commit: Commit) -> bool:
    """Whether the commit may open or close any request. Most commits do not, and are many."""
    return bool(commit.opens or commit.expires or commit.withdraws or commit.close)


async def settle_inputs(tx: Transaction, commit: Commit, session: LockedSession, now: str) -> Sequence[NewEvent]:
    """Open, expire and withdraw what the commit says; what is to be told of those that it closed."""
    for request in commit.opens:
        if request.session_id != commit.session_id:
            raise ValueError("a commit opens requests of its own session only")
        await tx.run("open_input", **rows.new_input(request, session.row.principal, now))
    closed = [
        each for each, answer in commit.expires.items() if await _close_input(tx, commit, each, "expired", answer, now)
    ]
    closed += [each for each in commit.withdraws if await _close_input(tx, commit, each, "withdrawn", None, now)]
    if commit.close:
        closed += await _withdraw_all(tx, commit.session_id, now)
    return [commit.resolved[each] for each in closed if each in commit.resolved]


async def _close_input(
    tx: Transaction, commit: Commit, request_id: str, status: InputStatus, answer: InputAnswer | None, now: str
) -> bool:
    """Close one request; False when it is closed already, or not one of this session."""
    closed = await tx.row(
        "close_input",
        session_id=commit.session_id,
        request_id=request_id,
        status=status,
        answer=rows.answer_text(answer),
        now=now,
    )
    return closed is not None


async def _withdraw_all(tx: Transaction, session_id: str, now: str) -> Sequence[str]:
    withdrawn = await tx.rows("withdraw_inputs", session_id=session_id, now=now)
    return sorted(row["request_id"] for row in withdrawn)
