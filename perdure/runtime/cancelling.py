"""Asking a session to stop what it does."""

from __future__ import annotations

from typing import Literal, TypeAlias

from perdure.errors import NoActiveSession
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import Commit, InputQuery, SessionRow, Store

from .driver import Driver

Cancelled: TypeAlias = Literal["accepted", "no_active_turn"]


class Cancellation:
    """Writes down that somebody wants a turn to stop, then tells the driver."""

    def __init__(self, store: Store, driver: Driver) -> None:
        self._store = store
        self._driver = driver

    async def cancel(self, row: SessionRow, turn_id: str | None = None) -> Cancelled:
        """Stop the session's turn, if it has one; with `turn_id`, only that one. Asking twice is asking once."""
        turn = await self._turn(row)
        if turn is None or turn_id not in (None, names.turn_id(turn)):
            return "no_active_turn"
        # The wish comes first: whatever becomes of us, readers know why the turn ends.
        await self._store.commit(Commit(row.session_id, events=[_requested(turn)]))
        try:
            await self._driver.cancel(row.session_id, names.turn_id(turn))
        except NoActiveSession:
            return "no_active_turn"
        return "accepted"

    async def _turn(self, row: SessionRow) -> int | None:
        """The turn that runs, waits for people, or is about to begin."""
        match row.status:
            case "completed" | "failed":
                return None
            case "running":
                return max(0, row.turns - 1)
            case "starting":
                return row.turns
            case "waiting":
                if (await self._store.inputs(InputQuery(session_id=row.session_id, limit=1))).rows:
                    return max(0, row.turns - 1)
                # No worker has taken it up yet.
                return row.turns if await self._expects(row.session_id) else None

    async def _expects(self, session_id: str) -> bool:
        for kind in ("message", "answer"):
            # From the future too: the database's clock may be ahead of this moment.
            if await self._store.unheard(kind=kind, older_than=-60, session_id=session_id):
                return True
        return False


def _requested(turn: int) -> NewEvent:
    return NewEvent(
        type=EventType.CANCEL_REQUESTED,
        key=names.turn_key(turn, "cancel-requested"),
        data={"turnId": names.turn_id(turn)},
        turn=turn,
    )
