"""Where every write to a session starts: with its row locked, nobody else writes to it until the transaction ends."""

from dataclasses import dataclass

from perdure.errors import SessionGone

from . import rows
from .base import SessionRow
from .port import Transaction


@dataclass(frozen=True)
class LockedSession:
    """A session whose row is ours until the transaction ends."""

    row: SessionRow
    closed_at: str | None

    @property
    def over(self) -> bool:
        return self.closed_at is not None or self.row.over


async def find(tx: Transaction, session_id: str) -> LockedSession | None:
    found = await tx.row("lock_session", session_id=session_id)
    return None if found is None else LockedSession(rows.session(found), found["closed_at"])


async def lock(tx: Transaction, session_id: str) -> LockedSession:
    session = await find(tx, session_id)
    if session is None:
        raise SessionGone(session_id=session_id)
    return session
