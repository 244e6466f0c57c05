"""The commit: what `Commit` promises, step by step, inside one transaction. The same code for every database."""

from collections.abc import Sequence
from dataclasses import replace

from perdure.errors import Superseded, TokenConflict
from perdure.protocol.events import NewEvent

from . import inputs, log, rows
from .base import (
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
from .codec import encode
from .locking import LockedSession, lock
from .port import Told, Transaction


async def apply(tx: Transaction, commit: Commit, now: str) -> Told[Committed]:
    """Do all that the commit asks for, or raise and leave the transaction to be rolled back."""
    session = await lock(tx, commit.session_id)
    if (existing := await _winner(tx, commit)) is not None:
        return Told(Committed(session.row, existing=existing))
    superseded = await _hold(tx, commit)
    await _record(tx, commit, now)
    head = await log.append(tx, commit.session_id, session.row.events, _events(commit, superseded), now)
    await _consume(tx, commit)
    await _write_slots(tx, commit)
    await _bind(tx, commit, session)
    await _close(tx, commit)
    if inputs.touched(commit):
        resolved = await inputs.settle(tx, commit, session, now)
        head = await log.append(tx, commit.session_id, head, resolved, now)
    row = _changed(replace(session.row, events=head, updated_at=now), commit.change)
    closed_at = session.closed_at or (now if commit.close else None)
    await tx.run("update_session", **rows.read_model(row), closed_at=closed_at)
    return Told(Committed(row, superseded=superseded), head if head > session.row.events else None)


async def record_at(tx: Transaction, session_id: str, turn: int, step: int, slot: str) -> Record | None:
    found = await tx.row("record", session_id=session_id, turn=turn, step=step, slot=slot)
    return None if found is None else rows.record(found)


async def _winner(tx: Transaction, commit: Commit) -> Record | None:
    return None if commit.unless is None else await record_at(tx, commit.session_id, *commit.unless)


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
            return standing is not None and standing < mine
        case Hold.KEEP | Hold.RELEASE:
            if standing != mine:
                raise Superseded
            if fence.hold is Hold.RELEASE:
                await tx.run("delete_fence", **place)
            return False


def _place(session_id: str, fence: Fence) -> dict[str, str | int]:
    return {"session_id": session_id, "turn": fence.turn, "step": fence.step, "scope": fence.scope}


def _events(commit: Commit, superseded: bool) -> Sequence[NewEvent]:
    if superseded and commit.superseding is not None:
        return (commit.superseding, *commit.events)
    return commit.events


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


def _changed(row: SessionRow, change: SessionChange | None) -> SessionRow:
    if change is None:
        return row
    return replace(
        row,
        status=change.status or row.status,
        turns=max(row.turns, change.turns or 0),
        steps=row.steps + change.steps,
        tool_calls=row.tool_calls + change.tool_calls,
        usage=row.usage + change.usage if change.usage else row.usage,
        error=row.error if change.error is None else change.error,
    )
