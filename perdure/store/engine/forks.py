"""Forks: new sessions that share the first turns of another one by reference."""

from perdure.errors import ForkRefused, SessionNotFound
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.store.values import FORK, Forked, NewFork, NewRecord

from . import rows
from .database import Row, Transaction
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
