"""Cancellations and sessions in need of attention, as rows: both outlive every process."""

from collections.abc import Callable

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.requests import Attention

from . import accepting, locking, log
from .base import CancelRequest
from .codec import encode
from .locking import LockedSession
from .port import Told, Transaction


async def cancel(
    tx: Transaction, session_id: str, turn_id: str | None, tell: Callable[[int], NewEvent], now: str
) -> Told[CancelRequest | None]:
    """Accept that the session's turn is to be stopped. Decided under the lock: no turn can end in between."""
    session = await locking.find(tx, session_id)
    turn = None if session is None else await _turn(tx, session)
    if session is None or turn is None or turn_id not in (None, names.turn_id(turn)):
        return Told(None)
    if session.row.cancel_turn == turn:
        return Told(CancelRequest(session_id, turn))
    await tx.run("set_cancel", session_id=session_id, turn=turn)
    return Told(CancelRequest(session_id, turn), await log.tell(tx, session.row, (tell(turn),), now))


async def _turn(tx: Transaction, session: LockedSession) -> int | None:
    """The turn that runs, waits for people, or is about to begin."""
    row = session.row
    if session.over:
        return None
    match row.status:
        case "running":
            return max(0, row.turns - 1)
        case "starting":
            return row.turns
        case "waiting" if await tx.row("has_open_input", session_id=row.session_id) is not None:
            return max(0, row.turns - 1)
        case "waiting" if await accepting.expects_turn(tx, row.session_id):
            # No worker has taken it up yet.
            return row.turns
        case _:
            return None


async def attend(tx: Transaction, session_id: str, attention: Attention, turn: int | None, now: str) -> Told[bool]:
    """Mark the session as one that cannot go on by itself. Saying the same again changes nothing.

    When `turn`, which could not go on, has ended since, this comes too late.
    """
    session = await locking.find(tx, session_id)
    if session is None or session.over:
        return Told(False)
    if turn is not None and session.row.turns > turn and session.row.status != "running":
        return Told(False)
    known = session.row.attention
    if known is not None and known["code"] == attention.code:
        return Told(False)
    # The index is new with each event, and so this is another key each time.
    number = session.row.events
    told = {"code": attention.code, "message": attention.message}
    stored = {**told, "since": now, "number": number}
    await tx.run("set_attention", session_id=session_id, attention=encode(stored))
    event = NewEvent(type=EventType.SESSION_ATTENTION, key=names.session_key(f"attention/{number}"), data=told)
    return Told(True, await log.tell(tx, session.row, (event,), now))
