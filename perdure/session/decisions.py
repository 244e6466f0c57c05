"""What a driver does next. Pure and total: no clock, no I/O, no logging."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from perdure.protocol.actions import Action, Done, Park
from perdure.protocol.deliveries import (
    AWAITED,
    CHILD_ANSWER,
    CHILD_KINDS,
    CHILD_RESULT,
    CLEAR,
    RESET,
    DeliveryRef,
    Mode,
)
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Awaited, Concluded, Conclusion, Coordinates, Failure, TurnRequest
from perdure.protocol.wire import JsonObject

from . import queue
from .state import UNKNOWN, Rebuild, SessionState, is_unknown

Boundary: TypeAlias = Literal["waiting", "completed", "failed"]

#: Kinds of deliveries that continue a parked turn.
_ANSWERS = frozenset({"answer", CHILD_ANSWER})

#: Kinds of deliveries that do not wait for answers: the open requests are withdrawn.
_ENDS_PARK = frozenset({CLEAR, RESET})

#: Seconds after which a delivery of an unknown kind is refused.
_UNKNOWN_KEPT = 3600.0
#: Seconds until the driver first continues as new, to find a build that knows the kind.
_FIRST_RENEWAL = 60.0


def boundary(mode: Mode, failure: Failure | None) -> Boundary:
    """The status of a session after a turn has ended."""
    if failure is None:
        return "waiting" if mode == "conversation" else "completed"
    # A conversation survives a failure that the next message may fix. A task has no next message.
    return "failed" if failure.structural or mode == "task" else "waiting"


def action_after_turn(mode: Mode, failure: Failure | None) -> Action:
    """What the driver does when a turn has ended."""
    match boundary(mode, failure):
        case "waiting":
            return Park()
        case "completed":
            return Done()
        case "failed":
            return Done(is_error=True)


def action_after_conclusion(mode: Mode, failure: Failure | None, concluded: Concluded | None) -> Action:
    """As above, but the session's status decides, if it is known: another process may have ended the turn."""
    if concluded is None or concluded.over is None:
        return action_after_turn(mode, failure)
    return Done(is_error=failure is not None) if concluded.over else Park()


CANCELLED = Failure(code="TURN_CANCELLED", message="The turn was cancelled.")


def heard(request: TurnRequest) -> tuple[DeliveryRef, ...]:
    """The deliveries of a turn that are in the store: not the results for which it waits."""
    return tuple(each for each in request.deliveries if each.kind != AWAITED)


def conclusion(
    request: TurnRequest, step: int, failure: Failure, kind: Literal["failed", "cancelled"] = "failed"
) -> Conclusion:
    """The input of `conclude_turn`: the end of a turn that no step could record."""
    return Conclusion(
        kind=kind,
        at=Coordinates(session_id=request.session_id, turn=request.turn, step=step),
        mode=request.mode,
        failure=failure,
        deliveries=heard(request),
    )


# --- the driver ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RebuildState:
    """Derive the state from the store."""

    rebuild: Rebuild


@dataclass(frozen=True)
class Withdraw:
    """Cancel the parked turn and withdraw its open requests."""


@dataclass(frozen=True)
class Refuse:
    """Refuse a delivery that no turn will read.

    Its token was replaced, no build knew its kind in time, or the turn was cancelled that it was to begin.
    """

    delivery: DeliveryRef
    code: str = "session_not_active"
    message: str = "The continuation token was replaced before this delivery was read."
    #: For Temporal's UI.
    summary: str = "stale delivery"
    #: Whether the delivery was to begin the turn that is to be cancelled.
    ends_cancel: bool = False


@dataclass(frozen=True)
class Remind:
    """Emit an event that a request is still open."""

    request: OpenInput


@dataclass(frozen=True)
class DispatchChildren:
    """Start the sessions to which the turn has handed work."""

    awaited: Awaited


@dataclass(frozen=True)
class StopChildren:
    """Cancel them: the turn is to be cancelled, or its deadline has passed."""

    awaited: Awaited


@dataclass(frozen=True)
class LookAtChildren:
    """Start, follow or cancel the sessions on other servers, which need that now."""

    awaited: Awaited


@dataclass(frozen=True)
class CollectChildren:
    """Record their results, and continue the turn."""

    awaited: Awaited
    results: tuple[DeliveryRef, ...]


@dataclass(frozen=True)
class ShowInputs:
    """Show what descendants ask people; the turn that waits for its children parks with it."""

    awaited: Awaited | None
    deliveries: tuple[DeliveryRef, ...]
    #: Whether the turn still waits for the children, and whether it has not parked yet.
    shows: bool
    parks: bool


@dataclass(frozen=True)
class RunTurn:
    """Run a turn over these deliveries, or start a held turn again."""

    deliveries: tuple[DeliveryRef, ...] = ()
    expired: tuple[str, ...] = ()
    held: JsonObject | None = None


@dataclass(frozen=True)
class ForgetCancel:
    """Drop the cancel request: the turn that it meant no longer exists."""


@dataclass(frozen=True)
class EndIdle:
    """End the session: nothing has happened in it for too long."""


@dataclass(frozen=True)
class Renew:
    """Continue as new."""


@dataclass(frozen=True)
class Wait:
    """Wait for work, or until this time."""

    until: float | None = None


Children: TypeAlias = DispatchChildren | StopChildren | LookAtChildren | CollectChildren | ShowInputs

Move: TypeAlias = RebuildState | Children | Withdraw | Refuse | Remind | RunTurn | ForgetCancel | EndIdle | Renew | Wait


def next_move(session: SessionState, now: float, *, renew: bool = False, bounded: bool = True) -> Move:
    """The next move of a driver, in the order of precedence. `bounded`: whether the run heeds the idle time-out."""
    if session.rebuild is not None:
        return RebuildState(session.rebuild)
    if move := _move_of_children(session, now):
        return move
    if _is_to_withdraw(session):
        return Withdraw()
    unknown = [delivery for delivery in session.inbox if is_unknown(delivery)]
    if refusal := _refusal(session, unknown):
        return refusal
    if due := reminders(session, now):
        return Remind(due[0])
    renew_at = _renew_at(session, unknown)
    if renew or (renew_at is not None and renew_at <= now):
        return Renew()
    if session.held is not None:
        return _held_move(session, session.held, now, renew_at)
    if session.awaited is not None and (session.awaits_children or session.cancel == "this"):
        # The turn goes on, or is cancelled, when its children have ended.
        deadline = session.awaited.deadline if session.awaited.phase == "started" else None
        return _wait(renew_at, deadline, session.awaited.look_at)
    return _move_between_turns(session, now, unknown, renew_at, bounded=bounded)


def _move_between_turns(
    session: SessionState, now: float, unknown: Sequence[DeliveryRef], renew_at: float | None, *, bounded: bool
) -> Move:
    overdue, batch = expired(session, now), next_batch(session)
    collected_at = queue.collected_at(session, batch)
    if overdue or (batch and (collected_at is None or collected_at <= now)):
        return RunTurn(batch, overdue)
    if session.cancel is not None and unknown:
        message = "The turn was cancelled before a worker could read this delivery."
        return Refuse(unknown[0], "turn_cancelled", message, "cancelled delivery", ends_cancel=True)
    if session.cancel is not None:
        return ForgetCancel()
    is_idle = not (batch or unknown) and session.awaited is None
    idle_end = session.idle_end if bounded and is_idle else None
    if idle_end is not None and idle_end <= now:
        return EndIdle()
    look_at = session.awaited.look_at if session.awaited else None
    return _wait(next_deadline(session), renew_at, idle_end, collected_at, look_at)


def _wait(*until: float | None) -> Wait:
    return Wait(min((time for time in until if time is not None), default=None))


def _refusal(session: SessionState, unknown: Sequence[DeliveryRef]) -> Refuse | None:
    """The refusal of a delivery that no turn will read, if there is one."""
    if stale := next((delivery for delivery in session.inbox if _is_stale(session, delivery)), None):
        return Refuse(stale)
    if late_result := next((delivery for delivery in session.inbox if _is_late_result(session, delivery)), None):
        return Refuse(late_result, "child_not_awaited", "No turn waits for this child any more.", "late child")
    # Refuse only in a run that began after the hour: it has looked for a newer build.
    looked = float("-inf") if session.looked_at is None else session.looked_at
    if late := next((each for each in unknown if _accepted_at(each) + _UNKNOWN_KEPT <= looked), None):
        message = f"No worker can read a delivery of this kind ({late.kind.removeprefix(UNKNOWN)})."
        return Refuse(late, "delivery_kind_unknown", message, "unknown delivery")
    return None


def _move_of_children(session: SessionState, now: float) -> Children | None:
    """What is to do for the children of a turn; None while they work."""
    if session.awaited is not None and (move := _move_of_awaited(session, session.awaited, now)):
        return move
    if session.held is None and session.asking:
        shows = session.awaited is not None and session.awaited.phase == "started" and session.cancel != "this"
        return ShowInputs(session.awaited, session.asking, shows, parks=shows and session.awaits_children)
    return None


def _move_of_awaited(session: SessionState, awaited: Awaited, now: float) -> Children | None:
    """Stop the children, start them, collect their results, or look at other servers: the first that is due."""
    late = awaited.deadline is not None and awaited.deadline <= now
    stops = session.cancel == "this" or late or awaited.phase == "abandoned"
    if stops and awaited.phase != "stopping":
        return StopChildren(awaited)
    if awaited.phase == "due":
        return DispatchChildren(awaited)
    results = session.results
    if len(results) == len(awaited.keys):
        return CollectChildren(awaited, results)
    return LookAtChildren(awaited) if awaited.look_at is not None and awaited.look_at <= now else None


def _is_late_result(session: SessionState, delivery: DeliveryRef) -> bool:
    """Whether a child reports, and no turn waits for that. A held turn may wait for it when it has begun again."""
    return delivery.kind == CHILD_RESULT and session.held is None and delivery not in session.results


def _is_to_withdraw(session: SessionState) -> bool:
    """Whether the open requests need no answer any more. An answer that was accepted before still counts."""
    if session.awaited is not None and session.cancel == "this":
        # The children end first.
        return False
    kinds = (each.kind for each in session.inbox if each.kind == "answer" or each.kind in _ENDS_PARK)
    ends = session.cancel == "this" or next(kinds, None) in _ENDS_PARK
    return ends and bool(session.open) and session.held is None


def renewed(session: SessionState, now: float) -> SessionState:
    """The state with which the driver continues as new."""
    return session.model_copy(update={"looked_at": now if any(map(is_unknown, session.inbox)) else None})


def _renew_at(session: SessionState, unknown: Sequence[DeliveryRef]) -> float | None:
    """When to continue as new to find a build that can read these. For each delivery the pauses double."""
    accepted = map(_accepted_at, unknown)
    looked = session.looked_at or 0.0
    return min((max(looked, each) + max(_FIRST_RENEWAL, looked - each) for each in accepted), default=None)


def _accepted_at(delivery: DeliveryRef) -> float:
    """When the store accepted it, in seconds since the epoch; 0 if that is not known."""
    try:
        return datetime.fromisoformat(delivery.at or "").timestamp()
    except ValueError:
        return 0.0


def _held_move(session: SessionState, held: JsonObject, now: float, renew_at: float | None) -> Move:
    if session.cancel == "this" or session.retry_at is None or session.retry_at <= now:
        return RunTurn(held=held)
    remind_at = min((each.remind_at[0] for each in session.open if each.remind_at), default=session.retry_at)
    return Wait(min(remind_at, session.retry_at, renew_at or session.retry_at))


def turn_request(session: SessionState, move: RunTurn) -> TurnRequest:
    """The input of the turn workflow."""
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
        deliveries=(*move.deliveries, *still_awaited(session.awaited)),
        open=session.open,
        expired=move.expired,
        traceparent=move.deliveries[-1].traceparent if move.deliveries else None,
        head=session.head,
        holds=True,
        bounds=session.bounds,
        root_session_id=session.parent.root_session_id if session.parent else None,
    )


def still_awaited(awaited: Awaited | None) -> tuple[DeliveryRef, ...]:
    """The calls of an earlier turn whose results a turn must wait for before it calls the model."""
    keys = () if awaited is None else awaited.keys
    return tuple(DeliveryRef(id=key, kind=AWAITED, token_hash="", action=key) for key in keys)


def _is_stale(session: SessionState, delivery: DeliveryRef) -> bool:
    # An answer needs no token: whether its responder may answer was checked when the answer was accepted.
    return delivery.kind == "message" and delivery.token_hash not in (session.token_hash, *session.retired)


def resumes(request: TurnRequest) -> bool:
    """Whether the turn first has to process answers or expired requests."""
    return request.step == 0 and (bool(request.expired) or any(each.kind in _ANSWERS for each in request.deliveries))


def next_batch(session: SessionState) -> tuple[DeliveryRef, ...]:
    """The deliveries of the next turn: the first one and, if it is collected, the others that are.

    While requests are open, only answers are read. All other deliveries wait in order until the session resumes.
    """
    if session.open:
        # One about the request of a descendant is about an open one: the others are gone by now.
        answer = next((delivery for delivery in session.inbox if delivery.kind in _ANSWERS), None)
        return () if answer is None else (answer,)
    inbox = tuple(each for each in session.inbox if not (is_unknown(each) or each.kind in CHILD_KINDS))
    return queue.collected(session, inbox) if inbox and inbox[0].coalesce else inbox[:1]


def has_ended(session: SessionState, turn: int | None) -> bool:
    """Whether this turn has ended. A parked turn has not, even while some of its answers are processed."""
    current = session.next_reader_turn - 1 if session.open else session.next_reader_turn
    return turn is not None and turn < current


def is_next_turn(session: SessionState, turn: int | None) -> bool:
    """Whether this is the turn after the one that runs: readers may see the end of a turn before the driver does."""
    return turn is not None and turn > session.turn


def starts_after_park(session: SessionState, turn: int | None) -> bool:
    """Whether requests are open, and this turn can begin only after they are answered."""
    waits = bool(session.open) and session.held is None
    return waits and turn is not None and turn >= session.next_reader_turn


def expired(session: SessionState, now: float) -> tuple[str, ...]:
    """The requests whose time to answer has ended."""
    return tuple(each.request_id for each in session.open if each.expires_at is not None and each.expires_at <= now)


def reminders(session: SessionState, now: float) -> tuple[OpenInput, ...]:
    """The requests with a reminder that is due."""
    return tuple(each for each in session.open if each.remind_at and each.remind_at[0] <= now)


def next_deadline(session: SessionState) -> float | None:
    """When the next open request expires or is due for a reminder."""
    times = [time for each in session.open for time in (each.expires_at, *each.remind_at[:1]) if time is not None]
    return min(times, default=None)
