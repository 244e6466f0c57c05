"""The lock of a session's row, and its event log: dense indexes from 0, each key once.

All writes to a session need the lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.errors import SessionGone
from perdure.protocol.events import NewEvent
from perdure.store.values import SessionRow

from . import rows
from .database import Transaction


async def append(tx: Transaction, session_id: str, head: int, events: Sequence[NewEvent], now: str) -> int:
    """Append the events whose keys are new, from index `head` on. The session's row must be locked."""
    if not events:
        return head
    known = {row["key"] for row in await tx.rows("known_keys", session_id=session_id, keys=[e.key for e in events])}
    for event in events:
        if event.key in known:
            continue
        await tx.run("insert_event", **rows.new_event(session_id, event, head, now))
        known.add(event.key)
        head += 1
    return head


async def emit(tx: Transaction, session: SessionRow, events: Sequence[NewEvent], now: str) -> int | None:
    """Append the events and update the session's row. The new head, or None when no event was new."""
    head = await append(tx, session.session_id, session.events, events, now)
    if head == session.events:
        return None
    await tx.run("advance_session", session_id=session.session_id, next_index=head, now=now)
    return head


@dataclass(frozen=True)
class LockedSession:
    """A session whose row this transaction has locked."""

    row: SessionRow
    closed_at: str | None

    @property
    def ended(self) -> bool:
        return self.closed_at is not None or self.row.ended


async def find(tx: Transaction, session_id: str) -> LockedSession | None:
    found = await tx.row("lock_session", session_id=session_id)
    return None if found is None else LockedSession(rows.session(found), found["closed_at"])


async def lock(tx: Transaction, session_id: str) -> LockedSession:
    session = await find(tx, session_id)
    if session is None:
        raise SessionGone(session_id=session_id)
    return session
