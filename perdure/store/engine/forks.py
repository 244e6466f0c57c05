"""Forks, which share the first turns of another session by reference, and sessions restored to an earlier turn."""

from collections.abc import Sequence
from dataclasses import replace

from perdure.errors import ForkRefused, RestoreRefused, SessionGone, SessionNotFound
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.values import FORK, Forked, NewFork, NewRecord, Restoration, SessionRow

from . import rows
from .database import Row, Transaction, Written
from .deliveries import insert
from .rows import LockedSession, encode


async def fork(tx: Transaction, fork: NewFork, now: str) -> Forked:
    """Write the fork, or find the first one under its idempotency key."""
    if fork.delivery is not None:
        # Before anything else, so that the later of two requests with one key waits here.
        accepted = await insert(tx, fork.delivery, now)
        if not accepted.fresh:
            return Forked(accepted.delivery.session_id, fresh=False)
    parent = await rows.find(tx, fork.parent)
    if parent is None:
        raise SessionNotFound
    await _insert(tx, fork, parent, now)
    for slot in await slots_at(tx, parent, fork.turn):
        await tx.run("write_slot", session_id=fork.session_id, **slot)
    if fork.delivery is not None:
        # The shared turns count as its reader: no turn of the fork may read it.
        wanted = [fork.delivery.delivery_id]
        await tx.rows("hear_deliveries", session_id=fork.session_id, delivery_ids=wanted, turn=fork.turn)
    return Forked(fork.session_id, fresh=True)


async def _insert(tx: Transaction, fork: NewFork, parent: LockedSession, now: str) -> None:
    row = parent.row
    await tx.run(
        "insert_fork",
        session_id=fork.session_id,
        agent=row.agent,
        mode=row.mode,
        owner=row.principal.owner,
        principal=encode(row.principal.model_dump()),
        capabilities=encode(row.capabilities.model_dump()),
        title=row.title,
        turns=fork.turn + 1,
        forked_from=fork.parent,
        left_out=_encoded([(first, min(until, fork.turn + 1)) for first, until in row.left_out if first <= fork.turn]),
        now=now,
    )
    await tx.row("insert_route", token_hash=fork.token_hash, session_id=fork.session_id)
    await write_marker(tx, fork.session_id, fork.turn, now)
    data = {"parent": {"sessionId": fork.parent, "turn": fork.turn}}
    event = NewEvent(type=EventType.SESSION_FORKED, key=names.session_key("forked"), data=data)
    head = await rows.append(tx, fork.session_id, 0, (event,), now)
    await tx.run("advance_session", session_id=fork.session_id, next_index=head, now=now)


async def write_marker(tx: Transaction, session_id: str, turn: int, now: str) -> None:
    """Write a record that code without forks cannot read.

    Such code would see no shared turn, and call the model without them. With this record it hands the session back as
    unreadable, until a worker of this version serves it.
    """
    marker = NewRecord(turn, 0, names.delivery_key(0), FORK, {})
    await tx.run("insert_record", **rows.new_record(session_id, marker, None, now))


async def slots_at(tx: Transaction, session: LockedSession, turn: int) -> list[dict[str, str | int]]:
    """The session's slots as they were at the end of this turn; `ForkRefused` when that was not recorded."""
    row = session.row
    current = await tx.rows("all_slots", session_id=row.session_id)
    if turn == row.turns - 1 and row.status != "running":
        return [{name: slot[name] for name in ("name", "value", "version")} for slot in current]
    found = [await _slot_at(tx, row.session_id, slot, turn) for slot in current]
    return [slot for slot in found if slot is not None]


async def _slot_at(tx: Transaction, session_id: str, slot: Row, turn: int) -> dict[str, str | int] | None:
    place = {"session_id": session_id, "name": slot["name"], "turn": turn}
    before = await tx.row("slot_before", **place)
    after = await tx.row("slot_after", **place)
    version: int = 0 if before is None else before["version"]
    following: int = slot["version"] + 1 if after is None else after["since"]
    if following != version + 1:
        # Older code does not record its writes.
        raise ForkRefused(
            f"The state after turn {turn} is not known: the slot {slot['name']!r} was written without a record.",
            reason="state_not_recorded",
        )
    return None if before is None else {"name": slot["name"], "value": before["value"], "version": version}


async def restore(tx: Transaction, restoration: Restoration, now: str) -> Written[SessionRow]:
    session = await rows.lock(tx, restoration.session_id)
    row, kept = session.row, restoration.kept
    if session.ended:
        raise SessionGone("The session has ended.")
    # The turn that runs or comes next: the first one that stays.
    current = row.turns - 1 if row.status == "running" else row.turns
    if kept is not None and not 0 <= kept < current:
        raise RestoreRefused(f"Turn {kept} has not ended; the session can be restored to turns before {current}.")
    if kept is not None and row.status == "running" and row.attention is None:
        raise RestoreRefused("A turn runs: wait for its end, or cancel it first.")
    if await tx.row("has_open_input", session_id=row.session_id) is not None:
        raise RestoreRefused("The session waits for people: cancel its turn first.")
    first = 0 if kept is None else kept + 1
    left_out = _merged([*row.left_out, (first, current)])
    if first >= current or left_out == list(row.left_out):
        return Written(row)
    if kept is not None:
        await _restore_slots(tx, session, kept)
    await tx.run("leave_out", session_id=row.session_id, left_out=_encoded(left_out))
    data: JsonObject = {"reason": restoration.reason, "keptFromTurn": names.turn_id(current)}
    if kept is not None:
        data["restoredTurn"] = names.turn_id(kept)
    key = names.session_key(f"reset/{first}-{current}")
    head = await rows.emit(tx, row, (NewEvent(type=EventType.SESSION_RESET, key=key, data=data),), now)
    return Written(replace(row, left_out=left_out, events=head or row.events), head)


async def _restore_slots(tx: Transaction, session: LockedSession, turn: int) -> None:
    """Write the slots as they were at the end of the turn, as new versions: what runs now must notice."""
    row = session.row
    try:
        then = {str(slot["name"]): slot for slot in await slots_at(tx, session, turn)}
    except ForkRefused as unknown:
        raise RestoreRefused(unknown.message) from None
    for slot in await tx.rows("all_slots", session_id=row.session_id):
        place = {"session_id": row.session_id, "name": slot["name"]}
        if slot["name"] not in then:
            await tx.run("delete_slot", **place)
            await tx.run("delete_slot_versions", **place)
        elif then[slot["name"]]["version"] != slot["version"]:
            again = {**place, "value": then[slot["name"]]["value"], "version": slot["version"] + 1}
            await tx.run("write_slot", **again)
            await tx.run("write_slot_version", turn=max(0, row.turns - 1), **again)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, those that touch as one."""
    merged: list[tuple[int, int]] = []
    for first, until in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((first, until))
    return merged


def _encoded(left_out: Sequence[tuple[int, int]]) -> str | None:
    return encode(left_out) if left_out else None
