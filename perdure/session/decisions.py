"""What happens next. Pure and total: no clock, no I/O, no logging."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from perdure.protocol.actions import Action, Done, Park
from perdure.protocol.deliveries import DeliveryRef, Mode
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Concluded, Failure, TurnRequest
from perdure.protocol.wire import JsonObject

from .state import Rebuild, SessionState

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


def after_conclusion(mode: Mode, failure: Failure | None, concluded: Concluded | None) -> Action:
    """As after a turn, when somebody else has ended it: how the session stands now decides, if that is known."""
    if concluded is None or concluded.over is None:
        return after_turn(mode, failure)
    return Done(is_error=failure is not None) if concluded.over else Park()


# --- the driver ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restore:
    """Derive the state from the store."""

    rebuild: Rebuild


@dataclass(frozen=True)
class Withdraw:
    """The parked turn is cancelled: nobody needs to answer any more."""


@dataclass(frozen=True)
class Refuse:
    """Answer a delivery that came with a token which is no longer the session's."""

    delivery: DeliveryRef


@dataclass(frozen=True)
class Remind:
    """Tell readers that a request still waits."""

    request: OpenInput


@dataclass(frozen=True)
class RunTurn:
    """Run a turn over these deliveries; one that could not go on is started again as it is."""

    deliveries: tuple[DeliveryRef, ...] = ()
    expired: tuple[str, ...] = ()
    held: JsonObject | None = None


@dataclass(frozen=True)
class ForgetCancel:
    """What was to be cancelled is not there any more."""


@dataclass(frozen=True)
class Renew:
    """Continue as new."""


@dataclass(frozen=True)
class Wait:
    """Nothing can be done before there is news, or before this time."""

    until: float | None = None


Move: TypeAlias = Restore | Withdraw | Refuse | Remind | RunTurn | ForgetCancel | Renew | Wait


def next_move(session: SessionState, now: float, *, renew: bool = False) -> Move:
    """All that a driver can do, in the order of precedence."""
    if session.rebuild is not None:
        return Restore(session.rebuild)
    if session.cancel == "this" and session.open and session.held is None:
        return Withdraw()
    if stale := next((delivery for delivery in session.inbox if _is_stale(session, delivery)), None):
        return Refuse(stale)
    if due := reminders(session, now):
        return Remind(due[0])
    if renew:
        return Renew()
    if session.held is not None:
        return _held_move(session, session.held, now)
    late, batch = expired(session, now), next_batch(session)
    if batch or late:
        return RunTurn(batch, late)
    if session.cancel is not None:
        return ForgetCancel()
    return Wait(next_look(session))


def _held_move(session: SessionState, held: JsonObject, now: float) -> Move:
    if session.cancel == "this" or session.retry_at is None or session.retry_at <= now:
        return RunTurn(held=held)
    look = next((each.remind_at[0] for each in session.open if each.remind_at), session.retry_at)
    return Wait(min(look, session.retry_at))


def turn_request(session: SessionState, move: RunTurn) -> TurnRequest:
    """What the turn is started with."""
    if move.held is not None:
        return TurnRequest.model_validate(move.held)
    return TurnRequest(
        session_id=session.session_id,
        turn=session.turn,
        agent=session.agent,
        model=session.model,
        mode=session.mode,
        capabilities=session.capabilities,
        snapshot=session.snapshot,
        deliveries=move.deliveries,
        open=session.open,
        expired=move.expired,
        traceparent=move.deliveries[-1].traceparent if move.deliveries else None,
        head=session.head,
        holds=True,
    )


def _is_stale(session: SessionState, delivery: DeliveryRef) -> bool:
    # An answer's right to be heard is the responder's, and was checked when it was given; it needs no token.
    return delivery.kind == "message" and delivery.token_hash not in (session.token_hash, *session.retired)


def resumes(request: TurnRequest) -> bool:
    """Whether the turn first has to look at what people decided."""
    return request.step == 0 and (bool(request.expired) or any(each.kind == "answer" for each in request.deliveries))


def next_batch(session: SessionState) -> tuple[DeliveryRef, ...]:
    """What the next turn reads: one delivery, and all that follow it while they ask to be folded in.

    While people are asked, only their answers are read; everything else waits behind the park, in order.
    """
    if session.open:
        answer = next((delivery for delivery in session.inbox if delivery.kind == "answer"), None)
        return () if answer is None else (answer,)
    if not session.inbox:
        return ()
    first, *rest = session.inbox
    size = 1
    if first.coalesce:
        while size <= len(rest) and rest[size - 1].coalesce:
            size += 1
    return session.inbox[:size]


def is_over(session: SessionState, turn: int | None) -> bool:
    """Whether this turn has ended. While people are asked, also while some answers are carried out, it has not."""
    current = session.next_told - 1 if session.open else session.next_told
    return turn is not None and turn < current


def is_to_come(session: SessionState, turn: int | None) -> bool:
    """Whether readers know already that the turn that runs is over, and mean the one after it."""
    return turn is not None and turn > session.turn


def comes_after_park(session: SessionState, turn: int | None) -> bool:
    """Whether people are still asked, and this turn begins only after they have answered."""
    waits = bool(session.open) and session.held is None
    return waits and turn is not None and turn >= session.next_told


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
