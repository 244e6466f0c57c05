"""What a driver does beside its turns for what it has accepted: it queues it in order, refuses it, asks again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from temporalio import workflow

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import AttendSession, Attention, Coordinates, Refusal, Reminder, Withdrawal
from perdure.session import decisions, queue
from perdure.session.state import SessionState, read_delivery, with_unknown_prefix

from . import versions
from .outcomes import execute_until_success


@dataclass(frozen=True)
class Heard:
    """The state after a signal with a delivery."""

    state: SessionState
    #: Whether the delivery was not queued before.
    is_new: bool = False
    #: Whether a driver that waits already has to decide again until when it waits.
    looks_again: bool = False


def hear(state: SessionState, data: Sequence[Any], *, in_turn: bool) -> Heard:
    """Queue the delivery of a signal once, after those that were accepted before it. `in_turn`: whether a turn runs."""
    delivery = read_delivery(data[0]) if len(data) == 1 else None
    unknown = delivery is not None and not versions.reads(delivery)
    # Older runs ignored deliveries of unknown kinds, which the sweeper signalled again.
    if delivery is None or (unknown and not (workflow.patched("keep-unknown-kinds") and state.has_room)):
        # If it is a delivery after all, it is also in the store, and is signalled again.
        workflow.logger.warning("A signal of unknown shape was ignored")
        return Heard(state)
    delivery = with_unknown_prefix(delivery, unknown=unknown)
    if state.is_changed(delivery) and workflow.patched("changed-references"):
        # Older runs kept what waits as it was signalled first.
        return Heard(_with_mode(state.with_change(delivery), delivery, in_turn=in_turn), looks_again=True)
    queued = _queued(state, delivery)
    is_new = queued is not state
    queued = _with_mode(queued, delivery, in_turn=in_turn) if is_new else queued
    # Older runs tried a held turn again at each signal; a replay must do the same.
    if is_new or (queued.held is not None and not workflow.patched("only-news-makes-due")):
        queued = queued.due()
    if is_new and queue.is_collected(delivery):
        # A driver that waits already has no timer for the end of this.
        return Heard(queued, is_new, looks_again=queued.collecting is not None)
    # Older runs that waited already did not look for a newer build before the next signal.
    return Heard(queued, is_new, is_new and unknown and workflow.patched("look-when-unknown-arrives"))


def _with_mode(state: SessionState, delivery: DeliveryRef, *, in_turn: bool) -> SessionState:
    """The state after what the mode of this delivery, which is queued, does to those that wait with it."""
    if queue.is_collected(delivery):
        return collecting(state)
    if delivery.supersedes is not None and workflow.patched("drop-superseded"):
        # Older runs began a turn for each of them, which found nothing to read.
        dropped = queue.without_superseded(state, delivery)
        as_stored = queue.superseded(state, delivery, in_turn=in_turn)
        # Older runs dropped the message of a task, too, and cancelled the turn of the one that interrupts.
        return as_stored if as_stored != dropped and workflow.patched("supersede-as-stored") else dropped
    return state


def collecting(state: SessionState) -> SessionState:
    """The state that waits for more messages to be collected. Older runs read what they had at once."""
    return queue.collecting(state, workflow.time()) if workflow.patched("wait-to-collect") else state


def _queued(state: SessionState, delivery: DeliveryRef) -> SessionState:
    # Older builds queued signals in the order of arrival; a replay of their runs must do the same.
    in_order = not state.is_out_of_order(delivery) or workflow.patched("inbox-in-order")
    return state.with_delivery(delivery, in_order=in_order)


async def refuse(session_id: str, move: decisions.Refuse) -> None:
    """Refuse a delivery that no turn can read. An accepted delivery always leads to an event."""
    refusal = Refusal(session_id=session_id, delivery_id=move.delivery.id, code=move.code, message=move.message)
    await execute_until_success(names.REFUSE_DELIVERY, refusal, summary=move.summary)


async def withdraw(state: SessionState) -> None:
    """Cancel the parked turn, and withdraw its open requests."""
    parked = Coordinates(session_id=state.session_id, turn=max(0, state.turn - 1))
    withdrawal = Withdrawal(at=parked, mode=state.mode, open=state.open)
    await execute_until_success(names.WITHDRAW_INPUTS, withdrawal, summary=f"withdraw: {len(state.open)} open")


async def remind(session_id: str, request: OpenInput) -> None:
    """Emit that a request is still open."""
    reminder = Reminder(session_id=session_id, request_id=request.request_id, left=len(request.remind_at) - 1)
    await execute_until_success(names.REMIND, reminder, summary="remind")


async def attend(session_id: str, attention: Attention | None, turn: int | None = None) -> None:
    """Set or clear the session's attention."""
    order = AttendSession(session_id=session_id, attention=attention, turn=turn)
    what = f"needs attention: {attention.code}" if attention else "recovered"
    await execute_until_success(names.ATTEND_SESSION, order, summary=what)
