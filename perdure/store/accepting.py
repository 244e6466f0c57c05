"""Deliveries on their way in: accepted once, then heard, refused or withdrawn."""

from perdure.errors import Conflict, IdempotencyConflict, SessionGone, TokenConflict, Unavailable
from perdure.protocol.events import NewEvent

from . import locking, log, rows
from .base import Accepted, NewDelivery, NewSession
from .port import Row, Told, Transaction


async def create_session(
    tx: Transaction, session: NewSession, delivery: NewDelivery | None, now: str
) -> Accepted | None:
    # The delivery comes first: of two requests under one key, the later one waits here, and has written nothing.
    accepted = None if delivery is None else await insert(tx, delivery, now)
    if accepted is not None and not accepted.fresh:
        return accepted
    if await tx.row("insert_session", **rows.new_session(session, now)) is None:
        raise Conflict("A session with this id exists already.", session_id=session.session_id)
    if await tx.row("insert_route", token_hash=session.token_hash, session_id=session.session_id) is None:
        raise TokenConflict
    return accepted


async def discard_session(tx: Transaction, session_id: str) -> None:
    session = await locking.find(tx, session_id)
    if session is None or session.row.status != "starting":
        return
    for query in _FORGET:
        await tx.run(query, session_id=session_id)


_FORGET = (
    "delete_routes",
    "delete_deliveries",
    "delete_fences",
    "delete_slots",
    "delete_inputs",
    "delete_records",
    "delete_events",
    "delete_session",
)


async def accept(tx: Transaction, delivery: NewDelivery, now: str) -> Accepted:
    # A repeated request gets its receipt even when the session is over by now.
    if (first := await find_first(tx, delivery)) is not None:
        return first
    session = await locking.lock(tx, delivery.session_id)
    if session.over:
        raise SessionGone("The session is over.", session_id=delivery.session_id)
    return await insert(tx, delivery, now)


async def withdraw(tx: Transaction, session_id: str, delivery_id: str) -> bool:
    await locking.find(tx, session_id)
    found = await tx.row("delivery", session_id=session_id, delivery_id=delivery_id)
    if found is None:
        return True
    if not _open(found):
        return False
    await tx.run("delete_delivery", session_id=session_id, delivery_id=delivery_id)
    return True


async def refuse(
    tx: Transaction, session_id: str, delivery_id: str, code: str, event: NewEvent, now: str
) -> Told[bool]:
    session = await locking.lock(tx, session_id)
    found = await tx.row("delivery", session_id=session_id, delivery_id=delivery_id)
    if found is None or found["turn"] is not None:
        return Told(False)
    if not _open(found):
        return Told(True)
    await tx.run("refuse_delivery", session_id=session_id, delivery_id=delivery_id, code=code)
    return Told(True, await log.tell(tx, session.row, (event,), now))


async def insert(tx: Transaction, delivery: NewDelivery, now: str) -> Accepted:
    """Write the delivery, unless another one under its key came first."""
    written = await tx.row("insert_delivery", **rows.new_delivery(delivery, now))
    if written is not None:
        return Accepted(rows.delivery(written), fresh=True)
    first = await find_first(tx, delivery)
    if first is None:
        raise Unavailable("The first delivery under this key was withdrawn just now.")
    return first


async def find_first(tx: Transaction, delivery: NewDelivery) -> Accepted | None:
    """The delivery that was accepted under this key, or under this id, before."""
    found = await _first(tx, delivery)
    if found is None:
        return None
    if found["digest"] != delivery.digest:
        raise IdempotencyConflict
    return Accepted(rows.delivery(found), fresh=False)


def _open(row: Row) -> bool:
    """Whether a turn may still hear the delivery."""
    return row["turn"] is None and row["refused"] is None


async def _first(tx: Transaction, delivery: NewDelivery) -> Row | None:
    if delivery.idempotency_key is not None:
        found = await tx.row("delivery_by_key", owner=delivery.owner, idempotency_key=delivery.idempotency_key)
        if found is not None:
            return found
    return await tx.row("delivery", session_id=delivery.session_id, delivery_id=delivery.delivery_id)
