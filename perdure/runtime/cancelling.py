"""Asking a session to stop what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import Store
from perdure.store.values import SessionRow

from .signals import Signals


@dataclass(frozen=True)
class Cancelled:
    status: Literal["accepted", "no_active_turn"]
    # Temporal could not be told yet; every step looks at the store all the same.
    delayed: bool = False


class Cancellation:
    """Accepts that a turn is to be stopped, then tells the driver, so that it happens at once."""

    def __init__(self, store: Store, signals: Signals) -> None:
        self._store = store
        self._signals = signals

    async def cancel(self, row: SessionRow, turn_id: str | None = None) -> Cancelled:
        """Stop the session's turn, if it has one; with `turn_id`, only that one. Asking twice is asking once."""
        request = await self._store.cancel(row.session_id, turn_id, _requested)
        if request is None:
            return Cancelled("no_active_turn")
        return Cancelled("accepted", delayed=not await self._signals.cancel(request))


def _requested(turn: int) -> NewEvent:
    return NewEvent(
        type=EventType.CANCEL_REQUESTED,
        key=names.turn_key(turn, "cancel-requested"),
        data={"turnId": names.turn_id(turn)},
        turn=turn,
    )
