"""The end of a turn outside a model call: it parks, fails or is cancelled.

Also the work on a session beside its turns: reminders, refused deliveries, attention, and its end."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.agents.registry import AgentRegistry
from perdure.errors import NeedsAttention, Superseded, TurnCancelled, UnreadableState
from perdure.faults import reach
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, delivery_refused
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import intent_key, outcome_key, stage_key
from perdure.protocol.requests import (
    Attention,
    CloseSession,
    Concluded,
    Conclusion,
    Coordinates,
    ParkTurn,
    Refusal,
    Reminder,
    Withdrawal,
)
from perdure.session.decisions import CANCELLED as CANCELLATION
from perdure.session.inputs import resolved
from perdure.store.base import Store, commit_with_retries
from perdure.store.inputs import InputQuery
from perdure.store.values import AlreadyBegun, Commit, DeliveryTaken, InputChanges, NewRecord, SessionChange, SessionRow
from perdure.telemetry import spans

from .events import EventFactory, results_in
from .journal import (
    CANCELLED_KEY,
    END,
    FAILURE,
    OUTCOME,
    PARK,
    RESUME,
    ConsumedDelivery,
    StoredFailure,
    StoredPark,
    TurnJournal,
    find_session,
    read_journal,
    written,
)
from .prompt import INTERRUPTED, NOT_EXECUTED
from .tools import builtin, outcomes
from .tools.records import Outcome, RequestedCall
from .turn_begin import begin_turn, completed_step, open_step, read_deliveries

_CANCELLED = "This call was cancelled before it was executed."


@dataclass(frozen=True)
class UnfinishedCall:
    """A call without an outcome, and its step."""

    at: Coordinates
    call: RequestedCall
    #: Whether an attempt has recorded its intent to run it; of a program, whether it has made calls.
    begun: bool
    #: The key of a record that must not be there yet when the call is closed.
    not_yet: str
    #: Of a program: what has become of its calls, by tool.
    made: tuple[tuple[str, str], ...] = ()

    @property
    def request(self) -> InputRequest | None:
        return self.call.ask.request if self.call.ask else None

    @property
    def next_key(self) -> tuple[int, int, str]:
        """The key of the record that a late attempt would write next."""
        return self.at.turn, self.at.step, self.not_yet

    def outcome(self, kind: str) -> Outcome:
        if self.call.program:
            code = outcomes.TURN_CANCELLED if kind == "cancelled" else outcomes.FAILED
            return outcomes.failed(outcomes.of_program("The program was stopped before its end.", self.made), code)
        if self.begun:
            return outcomes.failed(INTERRUPTED, outcomes.UNKNOWN, "unknown")
        if kind == "cancelled":
            return cancelled_before(self.call)
        if self.request and self.request.kind == "question":
            return builtin.ignored()
        if self.request:
            return outcomes.failed(NOT_EXECUTED, outcomes.DENIED, "rejected")
        return outcomes.failed(NOT_EXECUTED, outcomes.UNKNOWN, "unknown")


def cancelled_before(call: RequestedCall) -> Outcome:
    """The outcome of a call whose turn was cancelled before the call began."""
    if call.ask is None:
        return outcomes.failed(_CANCELLED, outcomes.TURN_CANCELLED)
    if call.ask.request.kind == "question":
        return builtin.ignored()
    return outcomes.failed(_CANCELLED, outcomes.DENIED, "rejected")


def unfinished_calls(session_id: str, turns: Sequence[tuple[int, TurnJournal]]) -> tuple[UnfinishedCall, ...]:
    return tuple(
        UnfinishedCall(
            at=Coordinates(session_id=session_id, turn=number, step=step),
            call=call,
            begun=turn.interrupted(step, call.call_id),
            not_yet=intent_key(call.call_id),
        )
        if not call.program
        else _unfinished_program(session_id, number, turn, step, call)
        for number, turn in turns
        for step in range(turn.last_step + 1)
        for call in turn.calls(step)
        if turn.outcome(step, call.call_id) is None
    )


def _unfinished_program(
    session_id: str, number: int, turn: TurnJournal, step: int, call: RequestedCall
) -> UnfinishedCall:
    return UnfinishedCall(
        at=Coordinates(session_id=session_id, turn=number, step=step),
        call=call,
        begun=False,
        not_yet=stage_key(call.call_id, len(turn.stages(step, call.call_id))),
        made=outcomes.made_by(turn, step, call.call_id),
    )


def close_unfinished(
    factory: EventFactory, conclusion: Conclusion, unfinished: Sequence[UnfinishedCall]
) -> tuple[tuple[NewRecord, ...], tuple[NewEvent, ...]]:
    """Outcome records, so that no late attempt can record another one, and their events in the current step."""
    records: list[NewRecord] = []
    events: list[NewEvent] = []
    for each in unfinished:
        outcome = each.outcome(conclusion.kind)
        call_id = each.call.call_id
        records.append(written(each.at.turn, each.at.step, outcome_key(call_id), OUTCOME, outcome))
        if (each.call.ref or each.call.child) and not each.call.program:
            result = factory.action_result(call_id, each.call.tool, outcome, each.at, of_child=bool(each.call.child))
            events.append(result)
    return tuple(records), tuple(events)


def withdrawals(unfinished: Sequence[UnfinishedCall]) -> dict[str, NewEvent]:
    """The events of the withdrawn requests, by their ids."""
    requests = [each.request for each in unfinished if each.request]
    return {request.request_id: resolved(request, "withdrawn", None) for request in requests}


class TurnParker:
    """Parks turns and emits reminders. Both methods are idempotent."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def park(self, park: ParkTurn) -> None:
        """Open the requests and emit their event in one commit."""
        at = park.at
        turn = await read_journal(self._store, at.session_id, at.turn)
        if turn.end_record or not (turn.deliveries() or turn.resumption):
            # The end is recorded already, or the turn has found nothing to do and has emitted no events.
            await find_session(self._store, at.session_id)
            return
        reach("park_before_commit")
        done = await commit_with_retries(self._store, await self._commit(park, turn))
        reach("park_after_commit")
        if done.existing is None:
            spans.turn_ended(park.agent, "parked")

    async def remind(self, reminder: Reminder) -> None:
        """Emit a reminder for the request, if it is still open."""
        await find_session(self._store, reminder.session_id)
        row = await self._store.input(reminder.request_id)
        if row is None or row.status != "open":
            return
        try:
            await self._store.commit(Commit(reminder.session_id, events=(_reminder_event(row.request, reminder.left),)))
        except Superseded:
            # The session has ended meanwhile.
            return

    async def _commit(self, park: ParkTurn, turn: TurnJournal) -> Commit:
        at, factory = park.at, EventFactory(park.at)
        reply = turn.reply(at.step)
        requests = [ask.request for ask in reply.asks] if reply else []
        # A turn that only processed some answers has no new requests: it emits those that are still open again.
        rows = [] if requests else [await self._store.input(each.request_id) for each in park.open]
        waiting = requests or [row.request for row in rows if row]
        if park.programs:
            requests = await self._of_programs(park, requests)
            waiting = list({each.request_id: each for each in (*waiting, *requests)}.values())
        ending = factory.parked()
        return Commit(
            at.session_id,
            unless_cancelled=at.turn,
            unless=(at.turn, at.step, END),
            records=(written(at.turn, at.step, END, PARK, StoredPark(open=park.open)),),
            events=(*completed_step(factory, turn), *_requested(factory, park, waiting), *ending.events),
            close_turn=at.turn,
            inputs=InputChanges(opens=requests),
            change=SessionChange(status=ending.status),
        )

    async def _of_programs(self, park: ParkTurn, requests: Sequence[InputRequest]) -> list[InputRequest]:
        """These requests, and those of programs that were not opened before."""
        wanted = {each.request_id for each in park.open}
        found = list(requests)
        for at in park.programs:
            journal = await read_journal(self._store, at.session_id, at.turn)
            for program in journal.programs(at.step):
                asks = [call.ask.request for call in journal.calls_of(at.step, program.call_id) if call.ask]
                found += [
                    each
                    for each in asks
                    if each.request_id in wanted and await self._store.input(each.request_id) is None
                ]
        return found


def _requested(factory: EventFactory, park: ParkTurn, waiting: Sequence[InputRequest]) -> list[NewEvent]:
    """One event for each place where some of these requests were shown first."""
    first_shown = {each.request_id: each.first_shown or park.at.place for each in park.open}
    by_place: dict[tuple[int, int], list[InputRequest]] = {}
    for request in waiting:
        by_place.setdefault(first_shown.get(request.request_id, park.at.place), []).append(request)
    return [factory.inputs_requested(requests, first_shown=place) for place, requests in by_place.items()]


def _reminder_event(request: InputRequest, left: int) -> NewEvent:
    data = {"requestId": request.request_id, "callId": request.call_id, "toolName": request.tool, "left": left}
    return NewEvent(
        type=EventType.INPUT_REMINDED,
        key=names.session_key(f"input/{request.request_id}/reminded/{left}"),
        data=data if request.expires_at is None else {**data, "expiresAt": request.expires_at},
        turn=request.turn,
        step=request.step,
    )


log = logging.getLogger("perdure.harness")


class TurnEnder:
    """Concludes turns and ends sessions. Its methods are idempotent.

    A worker whose store does not hold the session raises `SessionGone`, as for a step: it may use a wrong database,
    and must not report the work as done.
    """

    def __init__(self, store: Store, agents: AgentRegistry) -> None:
        self._store = store
        self._agents = agents

    async def conclude(self, conclusion: Conclusion) -> Concluded:
        """End a turn that failed or was cancelled, unless it has ended already."""
        session_id = conclusion.at.session_id
        row = await find_session(self._store, session_id)
        while not row.ended and await self._try_conclude(_with_cancel_request(conclusion, row), row):
            row = await find_session(self._store, session_id)
        row = await find_session(self._store, session_id)
        token_hash = await self._store.token_of(session_id)
        # The turn may have parked before this conclusion.
        park = None if row.ended else (await read_journal(self._store, session_id, conclusion.at.turn)).park
        return Concluded(
            token_hash=token_hash,
            head=row.events,
            silent=row.turns <= conclusion.at.turn,
            over=row.ended,
            open=park.open if park else (),
        )

    async def withdraw(self, withdrawal: Withdrawal) -> None:
        """Cancel the parked turn."""
        row = await find_session(self._store, withdrawal.at.session_id)
        # The driver may count turns without events; the parked turn is the last one in the store.
        parked = withdrawal.at.model_copy(update={"turn": min(withdrawal.at.turn, max(0, row.turns - 1))})
        await self.conclude(Conclusion(kind="cancelled", at=parked, mode=withdrawal.mode, failure=CANCELLATION))

    async def refuse(self, refusal: Refusal) -> None:
        """Refuse a delivery: no turn will consume it. The event has the reason."""
        event = delivery_refused(refusal.delivery_id, refusal.code, refusal.message)
        await self._store.refuse(refusal.session_id, refusal.delivery_id, refusal.code, event)

    async def close(self, close: CloseSession) -> bool:
        """End the session. A running or parked turn is cancelled first. False if it is to end idle, and is not."""
        row = await find_session(self._store, close.session_id)
        if row.ended:
            return True
        if close.if_idle and await self._store.count_unread(close.session_id) > 0:
            return False
        await self._try_stop(row)
        error = {"code": close.failure.code, "message": close.failure.message}
        event = NewEvent(
            type=EventType.SESSION_FAILED,
            key=names.session_key("closed"),
            data={**error, "sessionId": close.session_id},
        )
        change = SessionChange(status="failed", error=error)
        end = Commit(close.session_id, events=(event,), close=True, settles_cancel=True, change=change)
        try:
            await self._store.commit(replace(end, if_idle=close.if_idle))
        except AlreadyBegun:
            return False
        return True

    async def report(self, session_id: str, error: NeedsAttention) -> None:
        """Set the session's attention: no worker can serve it."""
        await self._write_attention(session_id, Attention(code=error.code, message=error.message))

    async def set_attention(self, session_id: str, attention: Attention | None, turn: int | None = None) -> None:
        """Set or clear the session's attention."""
        if attention is None:
            await self._store.commit(Commit(session_id, recovers=True))
            return
        await find_session(self._store, session_id)
        await self._write_attention(session_id, attention, turn)

    async def _write_attention(self, session_id: str, attention: Attention, turn: int | None = None) -> None:
        if await self._store.set_attention(session_id, attention, turn):
            log.warning("session %s needs attention: %s", session_id, attention.code)
            spans.needs_attention(attention.code)

    async def _try_stop(self, row: SessionRow) -> None:
        try:
            await self._stop(row)
        except UnreadableState:
            # Unreadable records may be the very reason why the operator ends the session.
            log.warning("the last turn of %s cannot be read; the session is closed without its end", row.session_id)

    async def _stop(self, row: SessionRow) -> None:
        page = await self._store.inputs(InputQuery(session_id=row.session_id, limit=1))
        if row.status != "running" and not page.rows:
            return
        at = Coordinates(session_id=row.session_id, turn=max(0, row.turns - 1))
        await self.conclude(Conclusion(kind="cancelled", at=at, failure=CANCELLATION))

    async def _try_conclude(self, conclusion: Conclusion, row: SessionRow) -> bool:
        """Try to conclude the turn; returns whether the attempt lost a race and must be repeated."""
        at = conclusion.at
        turn = await read_journal(self._store, at.session_id, at.turn)
        if turn.end_record and not (conclusion.kind == "cancelled" and turn.park):
            await self._store.commit(Commit(row.session_id, close_turn=at.turn, recovers=True))
            return False
        deliveries, turn = await read_deliveries(self._store, at, [each.id for each in conclusion.deliveries], turn)
        unfinished = unfinished_calls(at.session_id, [*await self._parked_before(at), (at.turn, turn)])
        nothing_accepted = not (deliveries or unfinished or turn.resumption)
        if nothing_accepted and not conclusion.failure.structural and conclusion.mode == "conversation":
            # The turn has consumed nothing, so it needs no boundary. A cancel request for it is settled.
            cancels = conclusion.kind == "cancelled"
            await self._store.commit(Commit(row.session_id, close_turn=at.turn, settles_cancel=cancels))
            return False
        if withdrawn := withdrawals(unfinished):
            # In a commit before the end of the turn: from then on no answer is accepted.
            inputs = InputChanges(withdraws=tuple(withdrawn), resolved=withdrawn)
            await self._store.commit(Commit(row.session_id, inputs=inputs))
        # An approved call has its fence in the turn that asked for it: close that too, against late attempts.
        for number in sorted({each.at.turn for each in unfinished if each.begun} - {at.turn}):
            await self._store.commit(Commit(row.session_id, close_turn=number))
        try:
            done = await self._store.commit(self._ending(conclusion, row, turn, deliveries, unfinished))
        except (AlreadyBegun, DeliveryTaken, TurnCancelled):
            return True
        if done.existing is None:
            spans.turn_ended(row.agent, conclusion.kind)
        return done.existing is not None

    async def _parked_before(self, at: Coordinates) -> list[tuple[int, TurnJournal]]:
        """The turns that parked directly before this one: their unfinished calls end with it."""
        parked: list[tuple[int, TurnJournal]] = []
        for number in range(at.turn - 1, -1, -1):
            turn = await read_journal(self._store, at.session_id, number)
            if turn.records and not turn.park:
                break
            parked.insert(0, (number, turn))
        return parked

    def _ending(
        self,
        conclusion: Conclusion,
        row: SessionRow,
        turn: TurnJournal,
        deliveries: tuple[ConsumedDelivery, ...],
        unfinished: Sequence[UnfinishedCall],
    ) -> Commit:
        # The driver may not know the last step of the turn.
        at = conclusion.at.model_copy(update={"step": max(conclusion.at.step, turn.last_step)})
        factory = EventFactory(at)
        cancelled = conclusion.kind == "cancelled"
        ending = (factory.cancelled if cancelled else factory.failed)(conclusion.mode, conclusion.failure)
        # If it is not recorded yet: the turn may have ended before its first step.
        agent = self._agents.get(row.agent)
        begin = begin_turn if cancelled else open_step
        opening = begin(factory, deliveries, turn, row.agent, (agent and agent.model) or "unknown")
        blocking = _blocking_records(conclusion, at, turn)
        call_records, call_events = close_unfinished(factory, conclusion, unfinished)
        return Commit(
            row.session_id,
            unless_cancelled=None if cancelled else at.turn,
            unless=(blocking[0].turn, blocking[0].step, blocking[0].key),
            # Their outcome says that they were not executed: an intent since then must make this commit fail.
            without=[each.next_key for each in unfinished if not each.begun],
            records=(*opening.records, *blocking, *call_records),
            events=(*opening.events, *call_events, *_completed_step(conclusion, turn), *ending.events),
            consume=opening.consume,
            close=ending.closes,
            close_turn=at.turn,
            change=ending.change(turns=at.turn + 1, tool_calls=results_in(call_events)),
        )


def _with_cancel_request(conclusion: Conclusion, row: SessionRow) -> Conclusion:
    """A turn with a cancel request ends as cancelled, even if it has failed."""
    if row.cancel_turn is None or row.cancel_turn > conclusion.at.turn:
        return conclusion
    return conclusion.model_copy(update={"kind": "cancelled", "failure": CANCELLATION})


def _completed_step(conclusion: Conclusion, turn: TurnJournal) -> tuple[NewEvent, ...]:
    """The `step.completed` event of the last step with a reply, so that readers can sum up the usage."""
    answered = [step for step in range(turn.last_step + 1) if turn.reply(step)]
    if conclusion.kind != "cancelled" or not answered:
        return ()
    return completed_step(EventFactory(conclusion.at).of_another_step(answered[-1]), turn)


def _blocking_records(conclusion: Conclusion, at: Coordinates, turn: TurnJournal) -> list[NewRecord]:
    """Records at the keys that a late attempt would write, so that it loses the race. The first key decides."""
    stored = StoredFailure(failure=conclusion.failure)
    blocking = [] if turn.at(at.step, names.REPLY) else [(at.step, names.REPLY)]
    blocking.append((at.step, CANCELLED_KEY if turn.at(at.step, END) else END))
    answers = not conclusion.deliveries or any(each.kind == "answer" for each in conclusion.deliveries)
    if answers and not turn.at(0, RESUME):
        blocking.append((0, RESUME))
    return [written(at.turn, step, key, FAILURE, stored) for step, key in blocking]
