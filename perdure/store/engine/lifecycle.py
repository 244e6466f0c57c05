"""What happens to whole sessions: export and import, deletion, the end of retention, and calls of other servers.

A deletion begins with a tombstone. Then the rows go in bounded transactions that a later process may continue.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeAlias

from perdure.errors import Conflict, SessionNotFound, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import CHILD_RESULT, DeliveryBody, DeliveryRef
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.lifecycle import Deletion, DueCallback, Keep, NewImport, NewRemoteCall, RemoteCall, hash_owner
from perdure.store.values import SessionRow, Slot

from . import rows
from .database import Row, Transaction, Value
from .deliveries import enqueue, insert, key_hash
from .history.forks import encoded_ranges, give_up_parent, hand_over, refuse_expired, slots_at
from .rows import before, decode, encode, stamp_after


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
        left_out=encoded_ranges(header.left_out),
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
        await tx.rows("hear_deliveries", session_id=new.session_id, delivery_ids=wanted, turn=header.turns - 1, now=now)
    data = {"turns": header.turns, "exportId": header.export_id}
    event = NewEvent(type=EventType.SESSION_IMPORTED, key=names.session_key("imported"), data=data)
    head = await rows.append(tx, new.session_id, 0, (event,), now)
    await tx.run("advance_session", session_id=new.session_id, next_index=head, now=now)


_NO_TOMBSTONE = "only a session with a tombstone is deleted"

#: The tables with rows of a session, except those that its end empties, and the names of their counts.
_TABLES = (
    ("purge_deliveries", "deliveries"),
    ("purge_inputs", "inputs"),
    ("purge_dead_letters", "deadLetters"),
    ("purge_callbacks", "callbacks"),
    ("purge_remote_calls", "remoteCalls"),
    ("purge_slots", "slots"),
    ("purge_slot_versions", "slotVersions"),
    ("purge_slot_steps", "slotSteps"),
    ("purge_records", "records"),
    ("purge_events", "events"),
    ("purge_attempts", "attempts"),
    ("purge_checkpoints", "checkpoints"),
)


#: Those with what was said and kept.
_CONTENT = (
    *("purge_records", "purge_slots", "purge_slot_versions", "purge_slot_steps", "purge_inputs"),
    "purge_checkpoints",
)


async def begin_deletion(tx: Transaction, session_id: str, now: str, *, part_of: str | None = None) -> Deletion | None:
    """Write the tombstone and take away the session's token; None when there is neither a session nor a tombstone."""
    session = await rows.find(tx, session_id)
    if session is not None:
        hashed = hash_owner(session.row.principal.owner)
        await tx.run("insert_deletion", session_id=session_id, owner_hash=hashed, now=now, part_of=part_of)
        await tx.run("delete_routes", session_id=session_id)
    return await find_deletion(tx, session_id)


async def parts_to_begin(tx: Transaction, session_id: str, limit: int) -> list[str]:
    """Children, without a tombstone, of a session that has one: such a session gets no more children."""
    if await tx.row("deletion", session_id=session_id) is None:
        raise ValueError(_NO_TOMBSTONE)
    return [row["session_id"] for row in await tx.rows("children_to_delete", session_id=session_id, limit=limit)]


async def begin_part(tx: Transaction, session_id: str, child: str, now: str) -> None:
    """Write the tombstone of a child of a session that has one.

    One at a time, and the session itself is not locked: a child is locked before its parent, a lane after its session,
    and the lanes of one in the order that a fork has for them.
    """
    await begin_deletion(tx, child, now, part_of=session_id)
    # Its own deletion may have begun before.
    await tx.run("set_whole", session_id=child, part_of=session_id)


async def find_deletion(tx: Transaction, session_id: str) -> Deletion | None:
    found = await tx.row("deletion", session_id=session_id)
    if found is None:
        return None
    counts: JsonObject = decode(found["counts"])
    if found["finished_at"] is None:
        counts = await _with_parts(tx, session_id, counts)
    return Deletion(
        session_id=session_id,
        owner_hash=found["owner_hash"],
        requested_at=found["requested_at"],
        finished_at=found["finished_at"],
        counts=counts,
    )


async def _with_parts(tx: Transaction, session_id: str, counts: JsonObject) -> JsonObject:
    """The counts of an unfinished deletion, and of its parts."""
    totals = Counter(counts)
    for part in await tx.rows("parts_of_deletion", session_id=session_id):
        # Not `+`: it would drop what was counted as none.
        totals.update(decode(part["counts"]))
    return dict(totals)


async def purge(tx: Transaction, session_id: str, limit: int, now: str) -> bool:
    """Delete or hand over about `limit` rows; True when none is left.

    A session is locked before its tombstone, everywhere.
    """
    known = await tx.row("session", session_id=session_id)
    if known is not None and known["forked_from"] is not None:
        # Its forks may get this parent. Were that deleted at the same time, it would not see them. It is locked first,
        # as by whoever forks: locks that are taken in one order cannot wait for each other.
        await rows.find(tx, known["forked_from"])
    session = await rows.find(tx, session_id)
    tombstone = await tx.row("lock_deletion", session_id=session_id)
    if tombstone is None:
        raise ValueError(_NO_TOMBSTONE)
    if tombstone["finished_at"] is not None:
        return True
    counts: JsonObject = decode(tombstone["counts"])
    if session is not None and known is not None and session.row.forked_from != known["forked_from"]:
        # It has got another one meanwhile; the next transaction sees that.
        return False
    if session is None:
        done = await _delete_rows(tx, session_id, limit, counts)
    elif not session.ended:
        raise Unavailable("The session has not ended yet.")
    else:
        done = False
        if await hand_over(tx, session, limit, counts, now):
            # From here on nobody finds the session, and no worker can write to it.
            await tx.run("delete_routes", session_id=session_id)
            await _forget_instance(tx, session_id)
            await tx.run("delete_fences", session_id=session_id)
            await tx.run("delete_session", session_id=session_id)
            await tx.run("delete_run", session_id=session_id)
            counts["sessions"] = 1
    await tx.run("count_deleted", session_id=session_id, counts=encode(counts))
    return done


async def _forget_instance(tx: Transaction, session_id: str) -> None:
    found = await tx.row("instance_of", session_id=session_id)
    if found is not None:
        await tx.run("forget_instance", session_id=session_id)
        await tx.run("purge_instances", token_hash=found["token_hash"])


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
            receipt = {name: row[name] for name in ("delivery_id", "accepted_at", "digest")}
            await tx.run("insert_deleted_key", key_hash=hashed, session_id=session_id, **receipt)


async def finish_deletion(tx: Transaction, session_id: str, executions: int, now: str) -> Deletion | None:
    await count_executions(tx, session_id, executions)
    tombstone = await tx.row("lock_deletion", session_id=session_id)
    unfinished = await tx.rows("unfinished_parts", session_id=session_id, limit=1)
    if tombstone is not None and tombstone["finished_at"] is None and not unfinished:
        counts = await _with_parts(tx, session_id, decode(tombstone["counts"]))
        await tx.run("count_deleted", session_id=session_id, counts=encode(counts))
        await tx.run("finish_deletion", session_id=session_id, now=now)
    return await find_deletion(tx, session_id)


async def count_executions(tx: Transaction, session_id: str, executions: int) -> None:
    """Several processes may delete them at once, and each may have seen others. The largest number counts."""
    tombstone = await tx.row("lock_deletion", session_id=session_id)
    if tombstone is not None and tombstone["finished_at"] is None:
        counts: JsonObject = decode(tombstone["counts"])
        counts["executions"] = max(counts.get("executions", 0), executions)
        await tx.run("count_deleted", session_id=session_id, counts=encode(counts))


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
    if session is None or state is None or (kind == "messages" and await _is_awaited(tx, session.row)):
        return False
    # The events of the last turn may still be needed: who has missed its end reads them.
    end = session.row.turns if session.ended else session.row.turns - 1
    first = max(state[kind], session.row.forked_turns)
    # Code before this one left the title and the answers: the last of its turns is looked at again.
    left = kind == "messages" and session.row.title is not None and first > session.row.forked_turns
    turn = begin = first - left
    while turn < min(end, first + _TURNS):
        place = {"session_id": session_id, "turn": turn, **_keys(session.row, turn)}
        newest = await tx.row("newest_of_turn", **place)
        if newest is not None and newest["newest"] is not None and newest["newest"] >= oldest:
            break
        await tx.run(f"expire_{kind}", **place)
        turn += 1
    if turn > begin:
        await tx.run(f"set_expired_{kind}", session_id=session_id, turns=turn, oldest=oldest)
    return turn == first + _TURNS


def _keys(session: SessionRow, turn: int) -> dict[str, Value]:
    """The keys of the events of a turn. A run has no other one, and its events have keys of the session."""
    first = names.turn_key(turn, "") if session.run is None else names.session_key("run/")
    # All keys with this prefix: "0" follows "/".
    return {"first": first, "until": f"{first[:-1]}0"}


async def _expire_records(tx: Transaction, session_id: str, oldest: str) -> bool:
    """Delete some records of an ended session, its state and its requests; False when none is left."""
    session = await rows.find(tx, session_id)
    if session is None or session.closed_at is None or session.closed_at >= oldest:
        return False
    if await _is_awaited(tx, session.row):
        return False
    if not session.row.records_expired:
        most = await tx.row("forks_of", session_id=session_id)
        if most is not None and most["forked_turns"] > 0:
            return False
        # From here on nobody forks or exports it: some of its turns are missing.
        await tx.run("set_expired_records", session_id=session_id, state=_GOING)
    if session.row.forked_from is not None:
        # What it shares would be kept for it, or handed over to it.
        await give_up_parent(tx, session_id)
    left = _ROWS
    for query in _CONTENT:
        left -= len(await tx.rows(query, session_id=session_id, limit=left))
        if left <= 0:
            return True
    await tx.run("expire_run", session_id=session_id)
    await tx.run("set_expired_records", session_id=session_id, state=_GONE)
    return False


async def _is_awaited(tx: Transaction, session: SessionRow) -> bool:
    """Whether the session has ended, and its parent has not read its result yet: that is read from its records."""
    if session.parent_id is None:
        return False
    report = names.delivery_of_child(session.session_id)
    found = await tx.row("delivery", session_id=session.parent_id, delivery_id=report)
    return found is not None and found["turn"] is None and found["refused"] is None


# --- other servers ------------------------------------------------------------------------------------------


async def claim_callback(tx: Transaction, session_id: str, lease: float, now: str) -> DueCallback | None:
    """Take the callback for `lease` seconds, if it is due; then it is due again."""
    until = stamp_after(now, lease)
    found = await tx.row("claim_callback", session_id=session_id, until=until, now=now)
    if found is None:
        return None
    return DueCallback(session_id, decode(found["callback"]), found["tries"], found["ended_at"])


async def settle_callback(tx: Transaction, session_id: str, outcome: str) -> None:
    await tx.run("settle_callback", session_id=session_id, outcome=outcome)
    # A session that was deleted leaves nothing.
    await tx.run("drop_callback", session_id=session_id)


async def begin_remote_call(tx: Transaction, call: NewRemoteCall, now: str) -> RemoteCall:
    """Write the call, or find it as it was begun before."""
    await tx.run(
        "insert_remote_call",
        session_id=call.session_id,
        action=call.action,
        token_hash=call.token_hash,
        state=encode(call.state),
        now=now,
    )
    found = await find_remote_call(tx, call.session_id, call.action)
    assert found is not None
    return found


async def find_remote_call(tx: Transaction, session_id: str, action: str) -> RemoteCall | None:
    found = await tx.row("remote_call", session_id=session_id, action=action)
    return None if found is None else _remote_call(found)


async def find_by_token(tx: Transaction, token_hash: str) -> RemoteCall | None:
    found = await tx.row("remote_call_by_token", token_hash=token_hash)
    return None if found is None else _remote_call(found)


async def end_remote_call(
    tx: Transaction, call: RemoteCall, result: JsonObject, state: JsonObject, now: str
) -> Accepted | None:
    """Deliver the result to the session that waits for it. None: another one came before, or the session has ended."""
    session = await rows.find(tx, call.session_id)
    place = {"session_id": call.session_id, "action": call.action}
    if await tx.row("end_remote_call", **place, state=encode(state), now=now) is None:
        return None
    if session is None or session.ended:
        return None
    ref = DeliveryRef(
        id=names.delivery_of_call(call.session_id, call.action), kind=CHILD_RESULT, token_hash="", action=call.action
    )
    body = DeliveryBody(kind=CHILD_RESULT, result=result)
    delivery = NewDelivery(
        session_id=call.session_id,
        delivery_id=ref.id,
        body=body.model_dump(mode="json", exclude_none=True),
        owner=session.row.principal.owner,
        ref=ref.model_dump(mode="json"),
    )
    return await enqueue(tx, session, delivery, now, limited=False)


def _remote_call(row: Row) -> RemoteCall:
    return RemoteCall(
        row["session_id"], row["action"], decode(row["state"]), row["begun_at"], row["ended_at"] is not None
    )
