"""What happens next. Pure and total: no clock, no I/O, no logging."""

from typing import Literal, TypeAlias

from perdure.protocol.actions import Action, Done, Park
from perdure.protocol.deliveries import DeliveryRef, Mode
from perdure.protocol.requests import Failure

from .state import SessionState

Boundary: TypeAlias = Literal["waiting", "completed", "failed"]


def boundary(mode: Mode, failure: Failure | None) -> Boundary:
    """How a session stands when a turn has ended."""
    if failure is None:
        return "waiting" if mode == "conversation" else "completed"
    # A conversation outlives what the next message may mend; a task has no next message.
    return "failed" if failure.structural or mode == "task" else "waiting"


def after_turn(mode: Mode, failure: Failure | None) -> Action:
    """What the driver does when a turn has ended."""
    match boundary(mode, failure):
        case "waiting":
            return Park()
        case "completed":
            return Done()
        case "failed":
            return Done(is_error=True)


def take_stale(session: SessionState) -> tuple[tuple[DeliveryRef, ...], SessionState]:
    """Take out of the inbox what came with a token that the session does not own."""
    stale = tuple(delivery for delivery in session.inbox if delivery.token_hash != session.token_hash)
    if not stale:
        return (), session
    kept = tuple(delivery for delivery in session.inbox if delivery.token_hash == session.token_hash)
    return stale, session.model_copy(update={"inbox": kept})


def next_batch(session: SessionState) -> tuple[tuple[DeliveryRef, ...], SessionState]:
    """Take what the next turn hears: one delivery, and all that follow it while they ask to be folded in."""
    if not session.inbox:
        return (), session
    first, *rest = session.inbox
    size = 1
    if first.coalesce:
        while size <= len(rest) and rest[size - 1].coalesce:
            size += 1
    return session.inbox[:size], session.model_copy(update={"inbox": session.inbox[size:]})
