"""Forks share turns by reference, and a restore leaves turns out. Both need the state of an earlier moment.

A fork between two steps of a turn copies what this turn has recorded up to there, so that only whole turns are shared.
"""

from collections.abc import Sequence
from dataclasses import replace

from perdure.errors import ForkRefused, RestoreRefused, SessionGone, SessionNotFound, TokenConflict, Unavailable
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.engine import rows
from perdure.store.engine.database import Row, Transaction, Value, Written
from perdure.store.engine.deliveries import insert, join_lanes
from perdure.store.engine.rows import LockedSession, encode
from perdure.store.lifecycle import FORK, Forked, NewFork, Restoration, leaves_out, left_out_up_to
from perdure.store.values import NewRecord, SessionRow

from .slots import BEFORE_STEPS, write_slot


async def fork(tx: Transaction, fork: NewFork, now: str) -> Forked:
    """Write the fork, or find the first one under its idempotency key."""
    if fork.delivery is not None:
        # Before anything else, so that the later of two requests with one key waits here.
        accepted = await insert(tx, fork.delivery, now)
        if not accepted.fresh:
            return Forked(accepted.delivery.session_id, fresh=False)
    owner = None if fork.cut is None else await _lock_owner(tx, fork)
    parent = await rows.find(tx, fork.parent)
    if owner is not None and await _owner(tx, fork) != owner:
        raise Unavailable("A session that shares this turn is being deleted; try again.")
    if fork.lane is not None:
        await join_lanes(tx, fork.parent)
    if parent is None or await tx.row("deletion", session_id=fork.parent) is not None:
        raise SessionNotFound
    refuse_expired(parent.row)
    if leaves_out(parent.row.left_out, fork.turn):
        raise ForkRefused(f"Turn {fork.turn} is left out of prompts since a restore.", reason="left_out")
    await _insert(tx, fork, parent, now)
    if fork.cut is None or owner is None:
        slots = await slots_at(tx, parent.row, fork.turn)
    else:
        slots = await _copy_turn(tx, fork, fork.cut, owner, parent.row, now)
    for slot in slots:
        await tx.run("write_slot", session_id=fork.session_id, **slot)
    if fork.delivery is not None:
        # The shared turns count as its reader: no turn of the fork may read it.
        wanted = [fork.delivery.delivery_id]
        await tx.rows("hear_deliveries", session_id=fork.session_id, delivery_ids=wanted, turn=fork.turn, now=now)
    return Forked(fork.session_id, fresh=True)


def refuse_expired(row: SessionRow) -> None:
    """`ForkRefused` when turns of the session are missing."""
    if row.records_expired:
        raise ForkRefused("The records of this session have expired.", reason="records_expired")


async def _insert(tx: Transaction, fork: NewFork, parent: LockedSession, now: str) -> None:
    row = parent.row
    shared = fork.turn + 1 if fork.cut is None else fork.turn
    place: JsonObject = {"turn": fork.turn} if fork.step is None else {"turn": fork.turn, "step": fork.step}
    await tx.run(
        "insert_fork",
        session_id=fork.session_id,
        agent=row.agent,
        mode=row.mode,
        owner=row.principal.owner,
        principal=encode(row.principal.model_dump()),
        capabilities=encode(row.capabilities.model_dump()),
        title=row.title,
        tags=rows.tags_text(row.tags),
        # They are about the state as it is now, which a fork of the last turn shares.
        notes=encode(list(row.notes)) if row.notes and fork.turn == row.turns - 1 and fork.cut is None else None,
        turns=fork.turn + 1,
        forked_from=fork.parent,
        forked_turns=shared,
        fork_place=encode(place),
        left_out=encoded_ranges(left_out_up_to(row.left_out, fork.turn)),
        bounds=rows.bounds_text(fork.bounds),
        lane=fork.lane,
        lane_of=None if fork.lane is None else fork.parent,
        now=now,
    )
    if await tx.row("insert_route", token_hash=fork.token_hash, session_id=fork.session_id) is None:
        raise TokenConflict
    if shared > 0:
        await _write_marker(tx, fork.session_id, shared - 1, now)
    data = {"parent": {"sessionId": fork.parent, **place}}
    event = NewEvent(type=EventType.SESSION_FORKED, key=names.session_key("forked"), data=data)
    head = await rows.append(tx, fork.session_id, 0, (event,), now)
    await tx.run("advance_session", session_id=fork.session_id, next_index=head, now=now)


async def _write_marker(tx: Transaction, session_id: str, turn: int, now: str) -> None:
    """Write a record that code without forks cannot read.

    Such code would see no shared turn, and call the model without them. With this record it hands the session back as
    unreadable, until a worker of this version serves it.
    """
    marker = NewRecord(turn, 0, names.delivery_key(0), FORK, {})
    await tx.run("insert_record", **rows.new_record(session_id, marker, None, now))


async def _lock_owner(tx: Transaction, fork: NewFork) -> str:
    """The session that has the records of the turn, which may be one before the parent.

    It is locked, so that no deletion hands them over meanwhile. It comes before the parent, as in a deletion: two locks
    that are taken in one order cannot wait for each other.
    """
    owner = await _owner(tx, fork)
    await rows.find(tx, owner)
    return owner


async def _owner(tx: Transaction, fork: NewFork) -> str:
    found = await tx.row("owner_of_turn", session_id=fork.parent, turn=fork.turn)
    if found is None:
        raise SessionNotFound
    return found["session_id"]


async def _copy_turn(
    tx: Transaction, fork: NewFork, cut: NewRecord, owner: str, parent: SessionRow, now: str
) -> list[dict[str, str | int]]:
    """Copy the first steps of the last turn, and end it there; returns the slots as they were then."""
    place = {"owner": owner, "session_id": fork.session_id, "turn": cut.turn, "step": cut.step}
    await tx.run("copy_records", **place)
    await tx.run("insert_record", **rows.new_record(fork.session_id, cut, None, now))
    current = await tx.rows("all_slots", session_id=parent.session_id)
    found = [await _slot_after_step(tx, parent, owner, slot["name"], slot["version"], cut) for slot in current]
    # What the fork is asked about this turn later, it answers from its own copy.
    await tx.run("copy_slot_steps", **place)
    await tx.run("copy_slot_versions", session_id=fork.session_id, turn=cut.turn)
    return [slot for slot in found if slot is not None]


async def _slot_after_step(
    tx: Transaction, parent: SessionRow, owner: str, name: str, version: int, cut: NewRecord
) -> dict[str, str | int] | None:
    place = {"session_id": owner, "name": name, "turn": cut.turn}
    # It must be known as well: code that records nothing may have written after the last step that is recorded.
    at_end = await _slot_at(tx, parent.session_id, name, version, cut.turn)
    whole = await tx.row("slot_of_turn", **place)
    if whole is None:
        return at_end
    steps = await tx.rows("slot_steps", **place)
    if not _is_unbroken(whole, steps):
        raise _not_recorded(f"inside turn {cut.turn}", name)
    until = max((step["step"] for step in steps if step["step"] <= cut.step), default=None)
    if until is None:
        return await _slot_at(tx, parent.session_id, name, version, cut.turn - 1)
    then = await tx.row("slot_step", **place, step=until)
    assert then is not None
    return {"name": name, "value": then["value"], "version": then["version"]}


def _is_unbroken(whole: Row, steps: Sequence[Row]) -> bool:
    """Whether each step begins with the version after that of the step before: older code does not record its steps."""
    expected = whole["since"]
    for step in steps:
        if step["since"] != expected:
            return False
        expected = step["version"] + 1
    return expected == whole["version"] + 1


async def slots_at(tx: Transaction, row: SessionRow, turn: int) -> list[dict[str, str | int]]:
    """The session's slots as they were at the end of this turn; `ForkRefused` when that was not recorded."""
    current = await tx.rows("all_slots", session_id=row.session_id)
    if turn == row.turns - 1 and row.status != "running":
        return [{name: slot[name] for name in ("name", "value", "version")} for slot in current]
    found = [await _slot_at(tx, row.session_id, slot["name"], slot["version"], turn) for slot in current]
    return [slot for slot in found if slot is not None]


async def _slot_at(tx: Transaction, session_id: str, name: str, current: int, turn: int) -> dict[str, str | int] | None:
    place = {"session_id": session_id, "name": name, "turn": turn}
    before = await tx.row("slot_before", **place)
    after = await tx.row("slot_after", **place)
    version: int = 0 if before is None else before["version"]
    following: int = current + 1 if after is None else after["since"]
    if following != version + 1:
        # Older code does not record its writes.
        raise _not_recorded(f"after turn {turn}", name)
    return None if before is None else {"name": name, "value": before["value"], "version": version}


def _not_recorded(when: str, name: str) -> ForkRefused:
    return ForkRefused(
        f"The state {when} is not known: the slot {name!r} was written without a record.", reason="state_not_recorded"
    )


async def restore(tx: Transaction, restoration: Restoration, now: str) -> Written[SessionRow]:
    session = await rows.lock(tx, restoration.session_id)
    row, kept = session.row, restoration.kept
    if row.run is not None:
        raise RestoreRefused("A run has no turns to go back to.")
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
    await tx.run("leave_out", session_id=row.session_id, left_out=encoded_ranges(left_out))
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
    newest = await tx.row("last_step", session_id=row.session_id, turn=current)
    step = BEFORE_STEPS if newest is None or newest["step"] is None else newest["step"]
    for slot in await tx.rows("all_slots", session_id=row.session_id):
        before = then.get(slot["name"], {"value": encode(None), "version": 0})
        if before["version"] != slot["version"]:
            again: dict[str, Value] = {"name": slot["name"], "value": before["value"], "version": slot["version"] + 1}
            await write_slot(tx, row.session_id, current, step, again)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, those that touch as one."""
    merged: list[tuple[int, int]] = []
    for first, until in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((first, until))
    return merged


def encoded_ranges(left_out: Sequence[tuple[int, int]]) -> str | None:
    return encode(left_out) if left_out else None


# --- what a deletion hands over -----------------------------------------------------------------------------


async def hand_over(tx: Transaction, session: LockedSession, limit: int, counts: JsonObject, now: str) -> bool:
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
    await tx.run("move_slot_steps", **place)
    if begin > 0:
        await _write_marker(tx, heir_id, begin - 1, now)
    rest = parent.session_id if begin > first else parent.forked_from if begin > 0 else None
    await tx.run("set_fork", session_id=heir_id, forked_from=rest, forked_turns=begin)
    await tx.run("adopt_forks", **place, parent=heir_id)
    counts["handedOver"] = counts.get("handedOver", 0) + len(moved)
    return False


async def give_up_parent(tx: Transaction, session_id: str) -> None:
    await tx.run("set_fork", session_id=session_id, forked_from=None, forked_turns=0)
