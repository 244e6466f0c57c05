"""Checkpoints: the state of a session as a snapshot, kept in the transaction of what makes it, and written again."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

from perdure.errors import CheckpointNotFound, RestoreRefused, SessionBusy, SessionGone
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.checkpoints import (
    LARGEST_SNAPSHOT,
    MOST_CHILDREN,
    MOST_NAMED,
    MOST_NOTES,
    SNAPSHOT_VERSION,
    UNNAMED_KEPT,
    Checkpoint,
    Rollback,
)
from perdure.store.engine import rows
from perdure.store.engine.database import Database, Row, Transaction, Value, Work, Written
from perdure.store.engine.deliveries import has_unread
from perdure.store.engine.rows import decode, decode_some, encode
from perdure.store.values import NewCheckpoint, SessionRow

from .slots import BEFORE_STEPS, write_slot

log = logging.getLogger("perdure.store")

#: Greater than any number.
_ALL = 2**53

#: What the store writes for itself. It is no state of authors, and a rollback leaves it as it is.
_RESERVED = "perdure."


async def take(tx: Transaction, row: SessionRow, wanted: NewCheckpoint, now: str) -> Sequence[NewEvent]:
    """Keep the state as a checkpoint; the event that says so, or why that was impossible."""
    counted = await tx.row("count_checkpoints", session_id=row.session_id)
    assert counted is not None
    snapshot, size, problem = None, 0, None
    if wanted.name is not None and counted["named"] >= MOST_NAMED:
        problem = f"the session has {MOST_NAMED} checkpoints with names"
    elif (await _size(tx, row.session_id)) > LARGEST_SNAPSHOT:
        problem = f"its state is larger than {LARGEST_SNAPSHOT} bytes"
    else:
        snapshot = encode(await _snapshot(tx, row, wanted.turn, wanted.step, now))
        size = len(snapshot.encode(errors="surrogatepass"))
        if size > LARGEST_SNAPSHOT:
            snapshot, problem = None, f"its state is larger than {LARGEST_SNAPSHOT} bytes"
    data: JsonObject = {"checkpointId": wanted.checkpoint_id, "name": wanted.name, **_place(wanted)}
    if snapshot is None:
        log.warning("a checkpoint of %s cannot be taken: %s", row.session_id, problem)
        data["reason"] = problem
        return (_event(EventType.CHECKPOINT_FAILED, wanted, "failed", data),)
    await tx.run(
        "insert_checkpoint",
        session_id=row.session_id,
        number=counted["last"] + 1,
        checkpoint_id=wanted.checkpoint_id,
        name=wanted.name,
        plan_step=wanted.plan_step,
        turn=wanted.turn,
        step=wanted.step,
        now=now,
        snapshot=snapshot,
        size=size,
    )
    await tx.run("drop_checkpoints", session_id=row.session_id, kept=UNNAMED_KEPT)
    if wanted.plan_step is not None:
        data["planStep"] = wanted.plan_step
    return (_event(EventType.CHECKPOINT_CREATED, wanted, "created", data),)


def _place(wanted: NewCheckpoint) -> JsonObject:
    return {"turnId": names.turn_id(wanted.turn), "stepIndex": wanted.step}


def _event(type: str, wanted: NewCheckpoint, what: str, data: JsonObject) -> NewEvent:
    key = names.session_key(f"checkpoint/{wanted.checkpoint_id}/{what}")
    return NewEvent(type=type, key=key, turn=wanted.turn, step=wanted.step, data=data)


async def _size(tx: Transaction, session_id: str) -> int:
    found = await tx.row("size_of_slots", session_id=session_id)
    assert found is not None
    return found["size"]


async def _newest_step(tx: Transaction, session_id: str, turn: int) -> int:
    # A fork reads the records of the turns that it shares where they are.
    owner = await tx.row("owner_of_turn", session_id=session_id, turn=turn)
    newest = None if owner is None else await tx.row("last_step", session_id=owner["session_id"], turn=turn)
    return 0 if newest is None or newest["step"] is None else max(0, newest["step"])


async def _snapshot(tx: Transaction, row: SessionRow, turn: int, step: int, now: str) -> JsonObject:
    children = await tx.rows("children_of", session_id=row.session_id, limit=MOST_CHILDREN)
    snapshot: JsonObject = {
        "version": SNAPSHOT_VERSION,
        "sessionId": row.session_id,
        "createdAt": row.created_at,
        "takenAt": now,
        "turn": turn,
        "step": step,
        "tags": dict(row.tags),
        "parentId": row.parent_id,
        "childrenIds": [each["session_id"] for each in children],
        "slices": [],
        "slots": {},
        "plan": None,
    }
    for slot in await tx.rows("all_slots", session_id=row.session_id):
        add_slot(snapshot, slot["name"], decode(slot["value"]))
    return snapshot


def add_slot(snapshot: JsonObject, name: str, stored: JsonObject | None) -> None:
    """Add a slot to the snapshot: a value without a version is of version 1."""
    if stored is None or (name.startswith(_RESERVED) and not _is_state(name)):
        return
    version, value = (1, stored["value"]) if "value" in stored else (stored.get("version"), stored.get("data"))
    described = stored.get("slice")
    if name == names.PLAN_SLOT and version == 1:
        snapshot["plan"] = value
    elif names.is_slice(name) and isinstance(described, dict):
        shown = name.removeprefix(names.SLICE_PREFIX)
        snapshot["slices"].append({"name": shown, **cast("JsonObject", described), "version": version, "items": value})
    else:
        snapshot["slots"][name] = value
        if version != 1:
            snapshot.setdefault("slotVersions", {})[name] = version


def _is_state(name: str) -> bool:
    return name == names.PLAN_SLOT or names.is_slice(name)


def slots_of(snapshot: JsonObject) -> dict[str, JsonObject]:
    """The slots as they are stored, by name, with those of slices and of the plan."""
    if snapshot.get("version") != SNAPSHOT_VERSION:
        raise RestoreRefused(f"The checkpoint has a snapshot of version {snapshot.get('version')!r}: a newer build's.")
    versions: JsonObject = snapshot.get("slotVersions") or {}
    slots = {name: _stored(value, versions.get(name, 1)) for name, value in snapshot["slots"].items()}
    for each in snapshot["slices"]:
        # Also what only a newer build knows of a slice.
        described = {name: said for name, said in each.items() if name not in ("name", "version", "items")}
        slots[names.SLICE_PREFIX + each["name"]] = {**_stored(each["items"], each["version"]), "slice": described}
    if snapshot.get("plan") is not None:
        slots[names.PLAN_SLOT] = _stored(snapshot["plan"], 1)
    return slots


def _stored(value: Any, version: Any) -> JsonObject:
    return {"value": value} if version == 1 else {"version": version, "data": value}


async def roll_back(tx: Transaction, rollback: Rollback, now: str) -> Written[SessionRow]:
    """Write the slots of the checkpoint again, as new versions, and leave a note for the next turn."""
    session = await rows.lock(tx, rollback.session_id)
    row = session.row
    if session.ended:
        raise SessionGone("The session has ended.")
    found = await tx.row("checkpoint", session_id=row.session_id, checkpoint_id=rollback.checkpoint_id)
    if found is None:
        raise CheckpointNotFound
    if row.status == "running" or await has_unread(tx, row.session_id):
        raise SessionBusy("A turn runs, or a delivery waits for one; wait for its end, or cancel it first.")
    checkpoint = _checkpoint(found)
    assert checkpoint.snapshot is not None
    then, restored = slots_of(checkpoint.snapshot), list[str]()
    for slot in await tx.rows("all_slots", session_id=row.session_id):
        name, current = slot["name"], decode(slot["value"])
        before = then.pop(name, None)
        if name.startswith(_RESERVED) and not _is_state(name):
            continue
        if (names.is_log(current) and not rollback.include_logs) or encode(before) == encode(current):
            # As text: Python says that true is 1.
            continue
        restored.append(name)
        again: dict[str, Value] = {"name": name, "value": encode(before), "version": slot["version"] + 1}
        await write_slot(tx, row.session_id, row.turns, BEFORE_STEPS, again)
    if not restored and await _was_last(tx, row, checkpoint.checkpoint_id):
        # The same again, or the same transaction once more: its caller has not seen that it succeeded.
        return Written(row)
    if then:
        # Slots are never deleted, so those of a checkpoint exist.
        raise RestoreRefused("The checkpoint has state that the session does not have.")
    if len(row.notes) >= MOST_NOTES:
        # The row of a session, and what the next turn tells the model, must not grow without a turn that reads it.
        raise RestoreRefused(f"The session was rolled back {MOST_NOTES} times since its last turn.")
    note = _note(checkpoint, restored)
    await tx.run("set_notes", session_id=row.session_id, notes=encode([*row.notes, note]))
    data: JsonObject = {"checkpointId": checkpoint.checkpoint_id, "name": checkpoint.name}
    data |= {"turnId": names.turn_id(checkpoint.turn), "stepIndex": checkpoint.step}
    key = names.session_key(f"rollback/{row.events}")
    head = await rows.emit(tx, row, (NewEvent(type=EventType.SESSION_ROLLED_BACK, key=key, data=data),), now)
    return Written((await rows.lock(tx, row.session_id)).row, head)


async def _was_last(tx: Transaction, row: SessionRow, checkpoint_id: str) -> bool:
    """Whether nothing has happened since the session was rolled back to this checkpoint."""
    found = await tx.rows("events", session_id=row.session_id, start=row.events - 1, limit=1)
    events = [rows.event(each) for each in found]
    return [(each.type, (each.data or {}).get("checkpointId")) for each in events] == [
        (EventType.SESSION_ROLLED_BACK, checkpoint_id)
    ]


def _note(checkpoint: Checkpoint, restored: Sequence[str]) -> str:
    named = f"the checkpoint {checkpoint.name!r}" if checkpoint.name else "an earlier checkpoint"
    what = ", ".join(
        "your plan" if each == names.PLAN_SLOT else each.removeprefix(names.SLICE_PREFIX) for each in restored
    )
    state = f"These are as they were then: {what}." if restored else "Nothing of it had changed since."
    return (
        f"The state of this session was set back to {named}, taken in turn {checkpoint.turn + 1}. {state} "
        "What was said and done since is not undone: messages stay, and so do the effects of tools."
    )


async def drop_notes(tx: Transaction, row: SessionRow, read: int) -> None:
    """The turn that begins here has read so many notes. Those that have come since then wait for the next one."""
    left = list(row.notes[read:])
    await tx.run("set_notes", session_id=row.session_id, notes=encode(left) if left else None)


def _checkpoint(row: Row) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=row["checkpoint_id"],
        session_id=row["session_id"],
        number=row["number"],
        turn=row["turn"],
        step=row["step"],
        taken_at=row["taken_at"],
        name=row["name"],
        plan_step=row["plan_step"],
        size=row["size"],
        snapshot=decode_some(row["snapshot"]),
    )


#: Writes to a session, and wakes its readers.
Write: TypeAlias = Callable[[str, Work[Written[SessionRow]]], Awaitable[SessionRow]]


class SqlCheckpoints:
    """`CheckpointStore` over one `Database`."""

    def __init__(self, database: Database, clock: Callable[[], str], write: Write) -> None:
        self._database = database
        self._now = clock
        self._write = write

    async def roll_back(self, rollback: Rollback) -> SessionRow:
        return await self._write(rollback.session_id, lambda tx: roll_back(tx, rollback, self._now()))

    async def list(self, session_id: str, limit: int, before: int | None = None) -> Sequence[Checkpoint]:
        place = {"session_id": session_id, "before": _ALL if before is None else before, "limit": limit}
        return [_checkpoint(row) for row in await self._database.read(lambda tx: tx.rows("checkpoints", **place))]

    async def find(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        place = {"session_id": session_id, "checkpoint_id": checkpoint_id}
        found = await self._database.read(lambda tx: tx.row("checkpoint", **place))
        return None if found is None else _checkpoint(found)

    async def snapshot(self, session_id: str) -> JsonObject | None:
        async def read(tx: Transaction) -> JsonObject | None:
            found = await rows.find(tx, session_id)
            if found is None:
                return None
            turn = max(0, found.row.turns - 1)
            return await _snapshot(tx, found.row, turn, await _newest_step(tx, session_id, turn), self._now())

        return await self._database.read(read)
