"""What happens to whole sessions: forks share turns by reference, a restore leaves turns out, a deletion removes all.

A deletion begins with a tombstone. Then the rows go in bounded transactions that a later process may continue.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from perdure.errors import Conflict, ForkRefused, RestoreRefused, SessionGone, SessionNotFound, Unavailable
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.lifecycle import (
    FORK,
    Deletion,
    Forked,
    Keep,
    NewFork,
    NewImport,
    Restoration,
    hash_owner,
    leaves_out,
    left_out_up_to,
)
from perdure.store.values import NewRecord, SessionRow, Slot

from . import rows
from .database import Row, Transaction, Written
from .deliveries import insert, key_hash
from .rows import LockedSession, before, decode, encode


async def fork(tx: Transaction, fork: NewFork, now: str) -> Forked:
    """Write the fork, or find the first one under its idempotency key."""
    if fork.delivery is not None:
        # Before anything else, so that the later of two requests with one key waits here.
        accepted = await insert(tx, fork.delivery, now)
        if not accepted.fresh:
            return Forked(accepted.delivery.session_id, fresh=False)
    parent = await rows.find(tx, fork.parent)
    if parent is None or await tx.row("deletion", session_id=fork.parent) is not None:
        raise SessionNotFound
    refuse_expired(parent.row)
    if leaves_out(parent.row.left_out, fork.turn):
        raise ForkRefused(f"Turn {fork.turn} is left out of prompts since a restore.", reason="left_out")
    await _insert(tx, fork, parent, now)
    for slot in await slots_at(tx, parent.row, fork.turn):
        await tx.run("write_slot", session_id=fork.session_id, **slot)
    if fork.delivery is not None:
        # The shared turns count as its reader: no turn of the fork may read it.
        wanted = [fork.delivery.delivery_id]
        await tx.rows("hear_deliveries", session_id=fork.session_id, delivery_ids=wanted, turn=fork.turn)
    return Forked(fork.session_id, fresh=True)


def refuse_expired(row: SessionRow) -> None:
    """`ForkRefused` when turns of the session are missing."""
    if row.records_expired:
        raise ForkRefused("The records of this session have expired.", reason="records_expired")


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
        left_out=_encoded(left_out_up_to(row.left_out, fork.turn)),
        bounds=rows.bounds_text(fork.bounds),
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


async def slots_at(tx: Transaction, row: SessionRow, turn: int) -> list[dict[str, str | int]]:
    """The session's slots as they were at the end of this turn; `ForkRefused` when that was not recorded."""
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
    if kept is not None and leaves_out(row.left_out, kept):
        raise RestoreRefused(f"Turn {kept} is left out of prompts already: name an earlier turn.")
    first = 0 if kept is None else kept + 1
    left_out = _merged([*row.left_out, (first, current)])
    if first >= current or left_out == list(row.left_out):
        return Written(row)
    if kept is not None:
        await _restore_slots(tx, session, kept, current)
    await tx.run("leave_out", session_id=row.session_id, left_out=_encoded(left_out))
    data: JsonObject = {"reason": restoration.reason, "keptFromTurn": names.turn_id(current)}
    if kept is not None:
        data["restoredTurn"] = names.turn_id(kept)
    key = names.session_key(f"reset/{first}-{current}")
    head = await rows.emit(tx, row, (NewEvent(type=EventType.SESSION_RESET, key=key, data=data),), now)
    return Written(replace(row, left_out=left_out, events=head or row.events), head)


async def _restore_slots(tx: Transaction, session: LockedSession, turn: int, current: int) -> None:
    """Write the slots as they were at the end of the turn, as new versions: what runs now must notice."""
    row = session.row
    try:
        then = {str(slot["name"]): slot for slot in await slots_at(tx, row, turn)}
    except ForkRefused as unknown:
        raise RestoreRefused(unknown.message) from None
    for slot in await tx.rows("all_slots", session_id=row.session_id):
        before = then.get(slot["name"], {"value": encode(None), "version": 0})
        if before["version"] != slot["version"]:
            again = {"name": slot["name"], "value": before["value"], "version": slot["version"] + 1}
            await tx.run("write_slot", session_id=row.session_id, **again)
            await tx.run("write_slot_version", session_id=row.session_id, turn=current, **again)


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


async def exported_slots(tx: Transaction, session_id: str, turn: int) -> list[Slot]:
    found = await tx.row("session", session_id=session_id)
    if found is None:
        raise SessionNotFound
    row = rows.session(found)
    refuse_expired(row)
    return [rows.slot(slot) for slot in await slots_at(tx, row, turn)]


async def import_session(tx: Transaction, new: NewImport, now: str) -> None:
    """Write the session and its records, which are read from the file one at a time."""
    header = new.export.header
    if new.delivery is not None:
        accepted = await insert(tx, new.delivery, now)
        if not accepted.fresh:
            raise Conflict(f"This file was imported already, as session {accepted.delivery.session_id}.")
    await tx.run(
        "insert_import",
        session_id=new.session_id,
        agent=header.agent,
        mode=header.mode,
        owner=new.principal.owner,
        principal=encode(new.principal.model_dump()),
        capabilities=encode(header.capabilities.model_dump()),
        title=rows.printable(header.title),
        turns=header.turns,
        left_out=_encoded(header.left_out),
        bounds=rows.bounds_text(new.bounds),
        now=now,
    )
    await tx.row("insert_route", token_hash=new.token_hash, session_id=new.session_id)
    for record in new.export.records():
        await tx.run("insert_record", **rows.new_record(new.session_id, record, None, now))
    for slot in new.export.slots:
        place = {"session_id": new.session_id, "name": slot.name, "value": encode(slot.value), "version": slot.version}
        await tx.run("write_slot", **place)
        await tx.run("write_slot_version", turn=header.turns - 1, **place)
    if new.delivery is not None:
        wanted = [new.delivery.delivery_id]
        await tx.rows("hear_deliveries", session_id=new.session_id, delivery_ids=wanted, turn=header.turns - 1)
    data = {"turns": header.turns, "exportId": header.export_id}
    event = NewEvent(type=EventType.SESSION_IMPORTED, key=names.session_key("imported"), data=data)
    head = await rows.append(tx, new.session_id, 0, (event,), now)
    await tx.run("advance_session", session_id=new.session_id, next_index=head, now=now)


#: The tables with rows of a session, except those that its end empties, and the names of their counts.
_TABLES = (
    ("purge_deliveries", "deliveries"),
    ("purge_inputs", "inputs"),
    ("purge_dead_letters", "deadLetters"),
    ("purge_slots", "slots"),
    ("purge_slot_versions", "slotVersions"),
    ("purge_records", "records"),
    ("purge_events", "events"),
)


async def begin_deletion(tx: Transaction, session_id: str, now: str) -> Deletion | None:
    """Write the tombstone and take away the session's token; None when there is neither a session nor a tombstone."""
    session = await rows.find(tx, session_id)
    if session is not None:
        hashed = hash_owner(session.row.principal.owner)
        await tx.run("insert_deletion", session_id=session_id, owner_hash=hashed, now=now)
        await tx.run("delete_routes", session_id=session_id)
    return await find_deletion(tx, session_id)


async def find_deletion(tx: Transaction, session_id: str) -> Deletion | None:
    found = await tx.row("deletion", session_id=session_id)
    return None if found is None else _deletion(found)


def _deletion(row: Row) -> Deletion:
    return Deletion(
        session_id=row["session_id"],
        owner_hash=row["owner_hash"],
        requested_at=row["requested_at"],
        finished_at=row["finished_at"],
        counts=decode(row["counts"]),
    )


async def purge(tx: Transaction, session_id: str, limit: int, now: str) -> bool:
    """Delete or hand over about `limit` rows; True when none is left."""
    tombstone = await tx.row("lock_deletion", session_id=session_id)
    if tombstone is None:
        raise ValueError("only a session with a tombstone is deleted")
    if tombstone["finished_at"] is not None:
        return True
    counts: JsonObject = decode(tombstone["counts"])
    session = await rows.find(tx, session_id)
    if session is None:
        done = await _delete_rows(tx, session_id, limit, counts)
    elif not session.ended:
        raise Unavailable("The session has not ended yet.")
    else:
        done = False
        if await _hand_over(tx, session, limit, counts, now):
            # From here on nobody finds the session, and no worker can write to it.
            await tx.run("delete_routes", session_id=session_id)
            await tx.run("delete_fences", session_id=session_id)
            await tx.run("delete_session", session_id=session_id)
            counts["sessions"] = 1
    await tx.run("count_deleted", session_id=session_id, counts=encode(counts))
    return done


async def _delete_rows(tx: Transaction, session_id: str, limit: int, counts: JsonObject) -> bool:
    left = limit
    for query, name in _TABLES:
        deleted = await tx.rows(query, session_id=session_id, limit=left)
        if query == "purge_deliveries":
            await _keep_keys(tx, session_id, deleted)
        counts[name] = counts.get(name, 0) + len(deleted)
        left -= len(deleted)
        if left <= 0:
            return False
    return True


async def _keep_keys(tx: Transaction, session_id: str, deleted: Sequence[Row]) -> None:
    for row in deleted:
        if row["idempotency_key"] is not None:
            hashed = key_hash(row["owner"], row["idempotency_key"])
            await tx.run("insert_deleted_key", key_hash=hashed, session_id=session_id)


async def _hand_over(tx: Transaction, session: LockedSession, limit: int, counts: JsonObject, now: str) -> bool:
    """Hand the last of the shared records to the fork that shares the most turns; True when no fork is left.

    After each transaction every fork sees the turns that it saw before: the heir owns its shared turns from one on, and
    the forks that share such turns become forks of the heir.
    """
    parent = session.row
    heir = await tx.row("forks_of", session_id=parent.session_id)
    if heir is None:
        return True
    heir_id, until = heir["session_id"], heir["forked_turns"]
    first = parent.forked_turns
    if until <= first:
        # What they share belongs to the session before this one.
        place = {"session_id": parent.session_id, "heir": "", "from_turn": -1, "until_turn": until}
        await tx.run("adopt_forks", **place, parent=parent.forked_from)
        return False
    locked = await rows.find(tx, heir_id)
    if locked is None or locked.row.records_expired:
        # It went meanwhile, or reads none of them any more: another one inherits.
        await give_up_parent(tx, heir_id)
        return False
    last = await tx.rows("last_records", session_id=parent.session_id, from_turn=first, until_turn=until, limit=limit)
    begin = last[-1]["turn"] if len(last) == limit else first
    place = {"session_id": parent.session_id, "heir": heir_id, "from_turn": begin, "until_turn": until}
    await tx.run("delete_fork_marker", session_id=heir_id, until_turn=until)
    moved = await tx.rows("move_records", **place)
    await tx.run("move_slot_versions", **place)
    if begin > 0:
        await write_marker(tx, heir_id, begin - 1, now)
    rest = parent.session_id if begin > first else parent.forked_from
    await tx.run("set_fork", session_id=heir_id, forked_from=rest, forked_turns=begin)
    await tx.run("adopt_forks", **place, parent=heir_id)
    counts["handedOver"] = counts.get("handedOver", 0) + len(moved)
    return False


async def finish_deletion(tx: Transaction, session_id: str, executions: int, now: str) -> Deletion | None:
    tombstone = await tx.row("lock_deletion", session_id=session_id)
    if tombstone is not None and tombstone["finished_at"] is None:
        counts = {**decode(tombstone["counts"]), "executions": executions}
        await tx.run("count_deleted", session_id=session_id, counts=encode(counts))
        await tx.run("finish_deletion", session_id=session_id, now=now)
    return await find_deletion(tx, session_id)


async def forget_deletions(tx: Transaction, before: str, limit: int) -> int:
    """Delete old tombstones; returns how many."""
    found = await tx.rows("old_deletions", before=before, limit=limit)
    for row in found:
        await tx.run("delete_deleted_keys", session_id=row["session_id"])
        await tx.run("delete_deletion", session_id=row["session_id"])
    return len(found)


# --- retention ----------------------------------------------------------------------------------------------

#: Turns of one transaction, and rows of one where turns do not count.
_TURNS = 20
_ROWS = 500

#: What `expired_records` says of the records of a session: all are gone, or they are being deleted. Code before this
#: one has only the first, and leaves a session alone that has the second.
_GONE = 1
_GOING = 2

Expiring: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, bool]]


def expiring(row: Row, keep: Keep, now: str) -> list[Expiring]:
    """The work for one session. Each is repeated in transactions of its own until it returns False."""
    session_id: str = row["session_id"]
    left = row["turns"] if row["closed_at"] is not None else row["turns"] - 1
    work: list[Expiring] = []
    # Messages first: they take the deltas with them.
    # A title without its messages was left by code before this one.
    has_title = row["title"] is not None and row["expired_messages"] > 0
    if keep.messages is not None and (row["expired_messages"] < left or has_title):
        work.append(_expiring_events(session_id, "messages", before(now, keep.messages)))
    if keep.deltas is not None and row["expired_deltas"] < left:
        work.append(_expiring_events(session_id, "deltas", before(now, keep.deltas)))
    if (
        keep.records is not None
        and row["closed_at"] is not None
        and (row["expired_records"] != _GONE or row["forked_from"])
    ):
        # Code before this one left an expired fork with its parent.
        oldest = before(now, keep.records)
        work.append(lambda tx: _expire_records(tx, session_id, oldest))
    return work


def _expiring_events(session_id: str, kind: Literal["deltas", "messages"], oldest: str) -> Expiring:
    return lambda tx: _expire_events(tx, session_id, kind, oldest)


async def _expire_events(tx: Transaction, session_id: str, kind: Literal["deltas", "messages"], oldest: str) -> bool:
    """Delete such events of a few turns; False when the next turn is too young, or is needed."""
    session = await rows.find(tx, session_id)
    state = await tx.row("expired", session_id=session_id)
    if session is None or state is None:
        return False
    # The events of the last turn may still be needed: who has missed its end reads them.
    end = session.row.turns if session.ended else session.row.turns - 1
    first = max(state[kind], session.row.forked_turns)
    # Code before this one left the title and the answers: the last of its turns is looked at again.
    left = kind == "messages" and session.row.title is not None and first > session.row.forked_turns
    turn = begin = first - left
    while turn < min(end, first + _TURNS):
        # All keys with this prefix: "0" follows "/".
        place = {"session_id": session_id, "turn": turn, "first": names.turn_key(turn, ""), "until": f"t{turn}0"}
        newest = await tx.row("newest_of_turn", **place)
        if newest is not None and newest["newest"] is not None and newest["newest"] >= oldest:
            break
        await tx.run(f"expire_{kind}", **place)
        turn += 1
    if turn > begin:
        await tx.run(f"set_expired_{kind}", session_id=session_id, turns=turn, oldest=oldest)
    return turn == first + _TURNS


async def give_up_parent(tx: Transaction, session_id: str) -> None:
    await tx.run("set_fork", session_id=session_id, forked_from=None, forked_turns=0)


async def _expire_records(tx: Transaction, session_id: str, oldest: str) -> bool:
    """Delete some records of an ended session, its state and its requests; False when none is left."""
    session = await rows.find(tx, session_id)
    if session is None or session.closed_at is None or session.closed_at >= oldest:
        return False
    if not session.row.records_expired:
        if await tx.row("forks_of", session_id=session_id) is not None:
            return False
        # From here on nobody forks or exports it: some of its turns are missing.
        await tx.run("set_expired_records", session_id=session_id, state=_GOING)
    if session.row.forked_from is not None:
        # What it shares would be kept for it, or handed over to it.
        await give_up_parent(tx, session_id)
    left = _ROWS
    for query in ("purge_records", "purge_slots", "purge_slot_versions", "purge_inputs"):
        left -= len(await tx.rows(query, session_id=session_id, limit=left))
        if left <= 0:
            return True
    await tx.run("set_expired_records", session_id=session_id, state=_GONE)
    return False
