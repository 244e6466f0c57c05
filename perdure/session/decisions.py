"""What happens next. Pure and total: no clock, no I/O, no logging."""

from typing import Literal, TypeAlias

from perdure.protocol.actions import Action, Done, Park
from perdure.protocol.deliveries import DeliveryRef, Mode
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Failure, TurnRequest

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
    stale = tuple(delivery for delivery in session.inbox if _is_stale(session, delivery))
    if not stale:
        return (), session
    kept = tuple(delivery for delivery in session.inbox if delivery not in stale)
    return stale, session.model_copy(update={"inbox": kept})


def _is_stale(session: SessionState, delivery: DeliveryRef) -> bool:
    # An answer's right to be heard is the responder's, and was checked when it was given; it needs no token.
    return delivery.kind == "message" and delivery.token_hash != session.token_hash


def resumes(request: TurnRequest) -> bool:
    """Whether the turn first has to look at what people decided."""
    return request.step == 0 and (bool(request.expired) or any(each.kind == "answer" for each in request.deliveries))


def next_batch(session: SessionState) -> tuple[tuple[DeliveryRef, ...], SessionState]:
    """Take what the next turn hears: one delivery, and all that follow it while they ask to be folded in.

    While people are asked, only their answers are heard; everything else waits behind the park, in order.
    """
    if session.open:
        answer = next((delivery for delivery in session.inbox if delivery.kind == "answer"), None)
        return ((), session) if answer is None else ((answer,), session.without(answer))
    if not session.inbox:
        return (), session
    first, *rest = session.inbox
    size = 1
    if first.coalesce:
        while size <= len(rest) and rest[size - 1].coalesce:
            size += 1
    return session.inbox[:size], session.model_copy(update={"inbox": session.inbox[size:]})


def is_over(session: SessionState, turn: int | None) -> bool:
    """Whether this turn has ended. While people are asked, also while some answers are carried out, it has not."""
    current = session.next_told - 1 if session.open else session.next_told
    return turn is not None and turn < current


def is_to_come(session: SessionState, turn: int | None) -> bool:
    """Whether readers know already that the turn that runs is over, and mean the one after it."""
    return turn is not None and turn > session.turn


def can_go_on(session: SessionState) -> bool:
    """Whether there is something that the next turn would hear."""
    return bool(next_batch(session)[0]) or bool(take_stale(session)[0])


def expired(session: SessionState, now: float) -> tuple[str, ...]:
    """The requests that have waited too long."""
    return tuple(each.request_id for each in session.open if each.expires_at is not None and each.expires_at <= now)


def reminders(session: SessionState, now: float) -> tuple[OpenInput, ...]:
    """The requests that somebody should be reminded of."""
    return tuple(each for each in session.open if each.remind_at and each.remind_at[0] <= now)


def next_look(session: SessionState) -> float | None:
    """When an open request wants attention, if nobody answers before."""
    times = [time for each in session.open for time in (each.expires_at, *each.remind_at[:1]) if time is not None]
    return min(times, default=None)
