"""Derives a driver's state from the store: after a loss, by an operator's order, or for a new fork.

It also says whether a session can begin with recorded turns: those that a fork shares, and those of an export.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TypeGuard

from perdure.errors import Invalid, UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef, Principal
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.inputs import OpenInput
from perdure.protocol.names import MODEL_SCOPE
from perdure.protocol.requests import Awaited, Coordinates, RebuildSession, Snapshot, TurnRequest
from perdure.protocol.wire import Wire
from perdure.session import decisions
from perdure.session.children import parent_ref
from perdure.session.state import SessionState, TurnState, dump_turn, read_delivery
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.engine.cursors import all_inputs
from perdure.store.inputs import InputQuery, InputRow
from perdure.store.lifecycle import Export, ExportHeader, leaves_out
from perdure.store.values import Attempt, Commit, Fence, Hold, NewRecord, SessionRow, Slot

from .journal import CUT, FORMATS, TurnJournal, find_session, read_journal, written
from .tools.approvals import REMEMBERED_APPROVALS, read_remembered


class StoredCut(Wire):
    """The end of a turn of which a fork shares the first steps only. It says nothing but that."""


class SessionRebuilder:
    """Derives the state that a driver has. A turn in progress becomes a held turn that starts again at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def rebuild(self, order: RebuildSession, attempt: Attempt) -> SessionState | None:
        """The state; None if the session has ended, or was deleted.

        Attempts that Temporal has lost may still write. The state must be of one moment: if events were committed
        meanwhile, this raises `Unavailable` and is retried.
        """
        if await self._store.deletion(order.session_id) is not None:
            # A session without a row and without this waits: the store may be an older copy.
            return None
        row = await find_session(self._store, order.session_id)
        if row.ended:
            return None
        snapshot = dump_turn(TurnState(usage=row.usage, steps=row.steps))
        token_hash = await self._store.token_of(row.session_id) or ""
        awaited = await self._awaited(row)
        # Requests of descendants are shown while a turn waits for them.
        own = InputQuery(session_id=row.session_id, status=None)
        whose = InputQuery(root=row.session_id, status=None) if awaited else own
        inputs = await all_inputs(self._store, whose)
        held = None
        if row.status == "running":
            waiting = await self._requests_before(row)
            held = await self._held(row, token_hash, snapshot, waiting, inputs)
            held = held.model_copy(update={"deliveries": (*held.deliveries, *decisions.still_awaited(awaited))})
        else:
            waiting = _waiting(inputs, await self._parked_requests(row), awaited)
        state = SessionState(
            session_id=row.session_id,
            agent=row.agent,
            mode=row.mode,
            capabilities=row.capabilities,
            token_hash=token_hash,
            turn=row.turns if held is None else held.turn,
            told=row.turns if held is None else held.turn,
            snapshot=snapshot,
            open=waiting,
            held=None if held is None else held.model_dump(mode="json"),
            retry_at=0.0,
            bounds=row.bounds,
            parent=parent_ref(row.parent),
            awaited=awaited,
        )
        state = state.active(datetime.fromisoformat(row.updated_at).timestamp())
        for delivery in await self._store.unread(row.session_id):
            # A delivery of a newer build stays in the store, and is signalled to a driver that can read it.
            if (waits := _reference(delivery, token_hash)) is not None:
                state = state.with_delivery(waits)
        if row.cancel_turn is not None and not decisions.starts_after_park(state, row.cancel_turn):
            state = state.cancelled("this")
        return state.model_copy(update={"head": await self._emit_rebuilt(row, order.reason, attempt)})

    async def _awaited(self, row: SessionRow) -> Awaited | None:
        """The calls of a parked turn that are still the work of other sessions. A running turn finds its own."""
        last = row.turns - (2 if row.status == "running" else 1)
        for number in range(last, -1, -1):
            turn = await read_journal(self._store, row.session_id, number)
            if turn.records and not turn.park:
                return None
            step = turn.last_step
            calls = [call for call in turn.calls(step) if call.child]
            if keys := tuple(call.key for call in calls if turn.outcome(step, call.call_id) is None):
                return Awaited(at=Coordinates(session_id=row.session_id, turn=number, step=step), keys=keys)
        return None

    async def _emit_rebuilt(self, row: SessionRow, reason: str, attempt: Attempt) -> int:
        key = names.session_key(f"rebuilt/{row.events}")
        event = NewEvent(type=EventType.SESSION_REBUILT, key=key, data={"reason": reason})
        # The next turn may consume other deliveries than a lost turn of the same number: the fence stops a late
        # attempt at that one.
        now = Attempt(number=0, generation=attempt.generation)
        closed = Fence(row.turns, 0, MODEL_SCOPE, now, Hold.RAISE) if row.status != "running" else None
        commit = Commit(row.session_id, head=row.events, current=True, fence=closed, events=(event,), recovers=True)
        done = await self._store.commit(commit)
        return done.session.events

    async def _parked_requests(self, row: SessionRow) -> tuple[OpenInput, ...]:
        """The requests with which the last turn parked."""
        park = (await read_journal(self._store, row.session_id, row.turns - 1)).park
        return park.open if park else ()

    async def _requests_before(self, row: SessionRow) -> tuple[OpenInput, ...]:
        """The requests with which the turn before the running one parked."""
        for turn in range(row.turns - 2, -1, -1):
            journal = await read_journal(self._store, row.session_id, turn)
            # Turns without events have no records either.
            if journal.records:
                return journal.park.open if journal.park else ()
        return ()

    async def _held(
        self,
        row: SessionRow,
        token_hash: str,
        snapshot: Snapshot,
        parked_before: tuple[OpenInput, ...],
        inputs: Sequence[InputRow],
    ) -> TurnRequest:
        """The request of the running turn from its first step: recorded work is not repeated."""
        number = max(0, row.turns - 1)
        journal = await read_journal(self._store, row.session_id, number)
        closed = {each.request.request_id for each in inputs if each.status != "open"}
        return TurnRequest(
            session_id=row.session_id,
            turn=number,
            agent=row.agent,
            mode=row.mode,
            capabilities=row.capabilities,
            snapshot=snapshot,
            deliveries=tuple(
                DeliveryRef(id=delivery.delivery_id, kind=delivery.kind, token_hash=token_hash)
                for delivery in journal.deliveries()
            ),
            open=parked_before,
            # All that are closed, so that the turn processes them: a call that was approved by expiry may not have
            # run yet, and a request may have been answered at the moment of its expiry.
            expired=tuple(each.request_id for each in parked_before if each.request_id in closed),
            token_hash=token_hash or None,
            holds=True,
            bounds=row.bounds,
        )


def _waiting(inputs: Sequence[InputRow], parked: Sequence[OpenInput], awaited: Awaited | None) -> tuple[OpenInput, ...]:
    """What the driver still has to process: open requests, and those that were closed since the turn parked."""
    known = {each.request_id for each in parked}
    more = [row.request for row in inputs if row.status == "open" and row.request.request_id not in known]
    return (
        *parked,
        *(
            OpenInput(
                request_id=request.request_id,
                expires_at=None
                if request.expires_at is None
                else datetime.fromisoformat(request.expires_at).timestamp(),
                # Those of descendants were shown behind the boundary, where the turn waits for its children.
                first_shown=awaited.at.place if awaited and request.session_id != awaited.at.session_id else None,
            )
            for request in more
        ),
    )


def _reference(row: DeliveryRow, token_hash: str) -> DeliveryRef | None:
    """A reference with the current token: the token was checked on acceptance. None if this build cannot read it."""
    known = row.ref or {"id": row.delivery_id, "kind": row.kind}
    return read_delivery({**known, "tokenHash": token_hash, "at": row.accepted_at})


# --- what a session can begin with ----------------------------------------------------------------------------


async def read_end(store: Store, session_id: str, turn: int, step: int | None = None) -> TurnJournal:
    """A journal that knows how the turn, and this step, have ended, and no messages, files and outcomes."""
    return TurnJournal(await store.outline(session_id, turn, step))


def boundary_problem(turn: int, step: int | None, journal: TurnJournal) -> tuple[str, str] | None:
    """Why the end of this turn, or of this step of it, is no boundary: a code, and a sentence."""
    if is_cut_by(step, journal):
        return _problem_of_step(turn, step, journal)
    if _was_cut(journal):
        return None
    if journal.end_record is None:
        return "turn_not_ended", f"Turn {turn} has not ended."
    return _parked(turn) if journal.park is not None else None


def _problem_of_step(turn: int, step: int, journal: TurnJournal) -> tuple[str, str] | None:
    if step > journal.last_step:
        return "step_not_begun", f"Nothing is recorded of a step {step} of turn {turn} so far."
    reply = journal.reply(step)
    if reply is not None and reply.asks:
        return _parked(turn)
    if reply is None or any(journal.at(step, names.outcome_key(call.call_id)) is None for call in reply.calls):
        return "step_not_ended", f"Step {step} of turn {turn} has not ended: a result is missing."
    return None


def _parked(turn: int) -> tuple[str, str]:
    # What people have answered is recorded with the turn that asked, and the effects of later turns with it.
    return "turn_parked", f"Turn {turn} waited for people; the turn that continues it is a boundary."


def _was_cut(journal: TurnJournal) -> bool:
    return any(CUT.includes(record) for record in journal.records)


def is_cut_by(step: int | None, journal: TurnJournal) -> TypeGuard[int]:
    """Whether a fork after this step shares a part of the turn: the last step of a turn that has ended is all of it."""
    ended = _was_cut(journal) or journal.end_record is not None
    return step is not None and not (ended and step == journal.last_step)


def cut_after(turn: int, step: int) -> NewRecord:
    """The record that ends the last shared turn of a fork after one of its steps."""
    return written(turn, step, names.CUT, CUT, StoredCut())


def is_between_turns(record: NewRecord) -> bool:
    return record.step == 0 and (record.key == names.MARK or record.key.startswith(names.BETWEEN_TURNS))


def check_turn(header: ExportHeader, turn: int, records: Sequence[NewRecord]) -> None:
    """`Invalid` for records that this version cannot read, or a last turn after which the session cannot continue."""
    if leaves_out(header.left_out, turn):
        # No prompt reads them.
        return
    try:
        for record in records:
            known = next((each for each in FORMATS if each.includes(record)), None)
            if known is None:
                raise UnreadableState(f"The format {record.format!r} is not known.")
            known.lift(record)
        problem = boundary_problem(turn, None, TurnJournal(records)) if turn == header.turns - 1 else None
        if turn >= header.turns and not (turn == header.turns and all(map(is_between_turns, records))):
            raise Invalid(f"Turn {turn} has not ended; the session has {header.turns} turns.")
    except UnreadableState as unreadable:
        raise Invalid(f"Turn {turn} cannot be read by this version of Perdure: {unreadable.message}") from None
    if problem is not None:
        raise Invalid(f"The session cannot continue after its last turn: {problem[1]}")


def slots_of(export: Export, principal: Principal) -> list[Slot]:
    """The slots of an export for a session of this principal; `Invalid` for those of Perdure that cannot be read.

    What one principal has approved once is not approved for another one.
    """
    try:
        for slot in export.slots:
            if slot.name == REMEMBERED_APPROVALS:
                read_remembered(slot.value)
    except UnreadableState as unreadable:
        raise Invalid(
            f"{export.path}: a slot cannot be read by this version of Perdure: {unreadable.message}"
        ) from None
    same = principal.owner == export.header.principal.owner
    return [slot for slot in export.slots if same or slot.name != REMEMBERED_APPROVALS]
