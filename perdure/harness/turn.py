"""The end of a turn that no model reply tells: it parks for people, or was stopped, or failed.

Also what happens to a session beside its turns: reminders, refused deliveries, attention, its end."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.agents.registry import AgentRegistry
from perdure.errors import NeedsAttention, Superseded, TurnCancelled, UnreadableState
from perdure.faults import reach
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, delivery_refused
from perdure.protocol.inputs import InputRequest, OpenInput
from perdure.protocol.names import intent_slot, outcome_slot
from perdure.protocol.requests import (
    Attention,
    CloseSession,
    Concluded,
    Conclusion,
    Coordinates,
    Parked,
    ParkTurn,
    Refusal,
    Reminder,
    Withdrawal,
)
from perdure.session.inputs import resolved
from perdure.session.turn import CANCELLED as CANCELLATION
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import Begun, Commit, DeliveryTaken, InputQuery, NewRecord, Record, SessionChange, SessionRow
from perdure.telemetry import spans

from .events import Ending, EventFactory, results_in
from .journal import (
    CANCELLED_SLOT,
    END,
    FAILURE,
    OUTCOME,
    PARK,
    RESUME,
    AskedCall,
    HeardDelivery,
    Outcome,
    StoredFailure,
    StoredPark,
    TurnJournal,
    model_outcome,
    written,
)
from .lookup import find_session
from .prompt import INTERRUPTED, NOT_EXECUTED
from .tools import builtin, outcomes
from .turn_begin import Opening, begin_turn, hear, open_step, previous_step

_CANCELLED = "This call was cancelled before it was executed."


@dataclass(frozen=True)
class LooseEnd:
    """A call without an outcome, and the step that asked for it."""

    at: Coordinates
    call: AskedCall
    #: Whether somebody was about to run it.
    begun: bool

    @property
    def request(self) -> InputRequest | None:
        return self.call.ask.request if self.call.ask else None

    @property
    def intent(self) -> tuple[int, int, str]:
        """The key of the record that says that somebody is about to run it."""
        return self.at.turn, self.at.step, intent_slot(self.call.call_id)

    def outcome(self, kind: str) -> Outcome:
        if self.begun:
            return outcomes.failed(INTERRUPTED, outcomes.UNKNOWN, "unknown")
        if kind == "cancelled":
            return cancelled_before(self.call)
        if self.request and self.request.kind == "question":
            return builtin.ignored()
        if self.request:
            return outcomes.failed(NOT_EXECUTED, outcomes.DENIED, "rejected")
        return outcomes.failed(NOT_EXECUTED, outcomes.UNKNOWN, "unknown")


def cancelled_before(call: AskedCall) -> Outcome:
    """What a call comes to when its turn is stopped before the call has begun."""
    if call.ask is None:
        return outcomes.failed(_CANCELLED, outcomes.TURN_CANCELLED)
    if call.ask.request.kind == "question":
        return builtin.ignored()
    return outcomes.failed(_CANCELLED, outcomes.DENIED, "rejected")


def loose_ends(session_id: str, turns: Sequence[tuple[int, TurnJournal]]) -> tuple[LooseEnd, ...]:
    return tuple(
        LooseEnd(
            at=Coordinates(session_id=session_id, turn=number, step=step),
            call=call,
            begun=turn.interrupted(step, call.call_id),
        )
        for number, turn in turns
        for step in range(turn.last_step + 1)
        for call in _calls(turn, step)
        if turn.outcome(step, call.call_id) is None
    )


def _calls(turn: TurnJournal, step: int) -> Sequence[AskedCall]:
    reply = turn.reply(step)
    return reply.calls if reply else ()


def tied(
    facts: EventFactory, conclusion: Conclusion, ends: Sequence[LooseEnd]
) -> tuple[tuple[NewRecord, ...], tuple[NewEvent, ...]]:
    """Their outcomes, told where the session is now, so that no late attempt can still have another one."""
    records: list[NewRecord] = []
    events: list[NewEvent] = []
    for end in ends:
        outcome = end.outcome(conclusion.kind)
        call_id = end.call.call_id
        records.append(written(end.at.turn, end.at.step, outcome_slot(call_id), OUTCOME, outcome))
        if end.call.ref:
            events.append(facts.action_result(call_id, end.call.tool, outcome, end.at))
    return tuple(records), tuple(events)


def withdrawals(ends: Sequence[LooseEnd]) -> dict[str, NewEvent]:
    """What readers are told of the requests that nobody needs to answer any more."""
    requests = [end.request for end in ends if end.request]
    return {request.request_id: resolved(request, "withdrawn", None) for request in requests}


class TurnParker:
    """Ends a turn whose other calls have ended; doing it twice is doing it once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def park(self, park: ParkTurn) -> None:
        """Open the requests and tell them, in one commit."""
        at = park.at
        records: list[Record] = list(await self._store.records(at.session_id, from_turn=at.turn, to_turn=at.turn))
        turn = TurnJournal(records)
        if turn.over or not (turn.heard() or turn.resumption):
            # Told already; or this turn has found nothing to do, and was never told to have begun.
            await find_session(self._store, at.session_id)
            return
        reach("park_before_commit")
        done = await commit_with_retries(self._store, await self._commit(park, turn))
        reach("park_after_commit")
        if done.existing is None:
            spans.turn_ended(park.agent, "parked")

    async def remind(self, reminder: Reminder) -> None:
        """Tell the readers that a request still waits, if it does."""
        await find_session(self._store, reminder.session_id)
        row = await self._store.input(reminder.request_id)
        if row is None or row.status != "open":
            return
        try:
            await self._store.commit(Commit(reminder.session_id, events=(_reminded(row.request, reminder.left),)))
        except Superseded:
            # Over meanwhile: there is nobody left to remind.
            return

    async def _commit(self, park: ParkTurn, turn: TurnJournal) -> Commit:
        at, facts = park.at, EventFactory(park.at)
        reply = turn.reply(at.step)
        asked = [ask.request for ask in reply.asks] if reply else []
        # A turn that only carried out some answers asks nothing new, and says again what still waits.
        waiting = asked or await self._still_open(park)
        ending = facts.parked()
        after = at.model_copy(update={"step": at.step + 1})
        return Commit(
            at.session_id,
            unless_cancelled=at.turn,
            unless=(at.turn, at.step, END),
            records=(written(at.turn, at.step, END, PARK, StoredPark(open=park.open)),),
            events=(*previous_step(after, None, turn), facts.inputs_requested(waiting), *ending.events),
            close_turn=at.turn,
            opens=asked,
            change=SessionChange(status=ending.status),
        )

    async def _still_open(self, park: ParkTurn) -> list[InputRequest]:
        rows = [await self._store.input(each.request_id) for each in park.open]
        return [row.request for row in rows if row]


def _reminded(request: InputRequest, left: int) -> NewEvent:
    told = {"requestId": request.request_id, "callId": request.call_id, "toolName": request.tool, "left": left}
    return NewEvent(
        type=EventType.INPUT_REMINDED,
        key=names.session_key(f"input/{request.request_id}/reminded/{left}"),
        data=told if request.expires_at is None else {**told, "expiresAt": request.expires_at},
        turn=request.turn,
        step=request.step,
    )


log = logging.getLogger("perdure.harness")


class TurnEnder:
    """Has the last word on a turn; saying it twice is saying it once.

    A worker whose store does not hold the session hands the work back, as for a step: it may look at another database
    than the one that does, and what it called done would never be.
    """

    def __init__(self, store: Store, agents: AgentRegistry) -> None:
        self._store = store
        self._agents = agents

    async def conclude(self, conclusion: Conclusion) -> Concluded:
        """End a turn that failed or was cancelled, unless it has ended already."""
        session_id = conclusion.at.session_id
        row = await find_session(self._store, session_id)
        while not row.ended and await self._unfinished(_as_wished(conclusion, row), row):
            row = await find_session(self._store, session_id)
        row = await find_session(self._store, session_id)
        return Concluded(
            token_hash=await self._store.token_of(session_id),
            head=row.events,
            silent=row.turns <= conclusion.at.turn,
            over=row.ended,
            open=() if row.ended else await self._parked_on(conclusion.at),
        )

    async def withdraw(self, withdrawal: Withdrawal) -> None:
        """Cancel a turn that waits for people."""
        row = await find_session(self._store, withdrawal.at.session_id)
        # Turns that found nothing to do were never told; the one that parked stands before them.
        parked = withdrawal.at.model_copy(update={"turn": min(withdrawal.at.turn, max(0, row.turns - 1))})
        await self.conclude(Conclusion(kind="cancelled", at=parked, mode=withdrawal.mode, failure=CANCELLATION))

    async def refuse(self, refusal: Refusal) -> None:
        """Say that no turn will hear a delivery, and why."""
        event = delivery_refused(refusal.delivery_id, refusal.code, refusal.message)
        await self._store.refuse(refusal.session_id, refusal.delivery_id, refusal.code, event)

    async def close(self, close: CloseSession) -> None:
        """End the session because an operator wants it: what runs or waits is cancelled first."""
        row = await find_session(self._store, close.session_id)
        if row.ended:
            return
        try:
            await self._stop(row)
        except UnreadableState:
            # The operator may end a session just because its records cannot be read.
            log.warning("the last turn of %s cannot be read; the session is closed without its end", close.session_id)
        told = {"code": close.failure.code, "message": close.failure.message}
        event = NewEvent(
            type=EventType.SESSION_FAILED,
            key=names.session_key("closed"),
            data={**told, "sessionId": close.session_id},
        )
        change = SessionChange(status="failed", error=told)
        await self._store.commit(
            Commit(close.session_id, events=(event,), close=True, settles_cancel=True, change=change)
        )

    async def attend(self, session_id: str, error: NeedsAttention) -> None:
        """Tell readers and operators that no worker can go on with the session."""
        await self._need(session_id, Attention(code=error.code, message=error.message))

    async def mark(self, session_id: str, attention: Attention | None, turn: int | None = None) -> None:
        """Set the session's attention, or take it back."""
        if attention is None:
            await self._store.commit(Commit(session_id, recovers=True))
            return
        await find_session(self._store, session_id)
        await self._need(session_id, attention, turn)

    async def _need(self, session_id: str, attention: Attention, turn: int | None = None) -> None:
        if await self._store.attend(session_id, attention, turn):
            log.warning("session %s needs attention: %s", session_id, attention.code)
            spans.needs_attention(attention.code)

    async def _stop(self, row: SessionRow) -> None:
        page = await self._store.inputs(InputQuery(session_id=row.session_id, limit=1))
        if row.status != "running" and not page.rows:
            return
        at = Coordinates(session_id=row.session_id, turn=max(0, row.turns - 1))
        await self.conclude(Conclusion(kind="cancelled", at=at, failure=CANCELLATION))

    async def _unfinished(self, conclusion: Conclusion, row: SessionRow) -> bool:
        """Try to end the turn; whether somebody came in between."""
        at = conclusion.at
        turn = await self._turn(at.session_id, at.turn)
        if turn.over and not (conclusion.kind == "cancelled" and turn.parked):
            await self._store.commit(Commit(row.session_id, close_turn=at.turn, recovers=True))
            return False
        heard, turn = await hear(self._store, at, [each.id for each in conclusion.deliveries], turn)
        ends = loose_ends(at.session_id, [*await self._waiting(at), (at.turn, turn)])
        nobody = not (heard or ends or turn.resumption)
        if nobody and not conclusion.failure.structural and conclusion.mode == "conversation":
            # Nothing was accepted, so nobody waits for a boundary; a wish to stop it has met nothing.
            if conclusion.kind == "cancelled":
                await self._store.commit(Commit(row.session_id, settles_cancel=True))
            return False
        await self._withdraw(row, ends)
        # A call that people had approved holds its place in the turn that asked for it: no late attempt keeps that.
        for number in sorted({end.at.turn for end in ends if end.begun} - {at.turn}):
            await self._store.commit(Commit(row.session_id, close_turn=number))
        try:
            done = await self._store.commit(self._ending(conclusion, row, turn, heard, ends))
        except (Begun, DeliveryTaken, TurnCancelled):
            return True
        if done.existing is None:
            spans.turn_ended(row.agent, conclusion.kind)
        return done.existing is not None

    async def _turn(self, session_id: str, turn: int) -> TurnJournal:
        records: list[Record] = list(await self._store.records(session_id, from_turn=turn, to_turn=turn))
        return TurnJournal(records)

    async def _parked_on(self, at: Coordinates) -> tuple[OpenInput, ...]:
        """What the turn waits for, if it had parked before anybody could conclude it otherwise."""
        over = (await self._turn(at.session_id, at.turn)).over
        outcome = model_outcome(over) if over else None
        return outcome.open if isinstance(outcome, Parked) else ()

    async def _waiting(self, at: Coordinates) -> list[tuple[int, TurnJournal]]:
        """The turns that parked just before this one: their calls end with it."""
        waiting: list[tuple[int, TurnJournal]] = []
        for number in range(at.turn - 1, -1, -1):
            turn = await self._turn(at.session_id, number)
            if turn.records and not turn.parked:
                break
            waiting.insert(0, (number, turn))
        return waiting

    async def _withdraw(self, row: SessionRow, ends: Sequence[LooseEnd]) -> None:
        """First of all nobody can answer any more."""
        if told := withdrawals(ends):
            await self._store.commit(Commit(row.session_id, withdraws=tuple(told), resolved=told))

    def _ending(
        self,
        conclusion: Conclusion,
        row: SessionRow,
        turn: TurnJournal,
        heard: tuple[HeardDelivery, ...],
        ends: Sequence[LooseEnd],
    ) -> Commit:
        # The driver may not know how far the turn has come.
        at = conclusion.at.model_copy(update={"step": max(conclusion.at.step, turn.last_step)})
        facts = EventFactory(at)
        ending = _told(facts, conclusion)
        begun = self._begun(conclusion, at, row, turn, heard)
        doors = _doors(conclusion, at, turn)
        lost_records, lost_events = tied(facts, conclusion, ends)
        return Commit(
            row.session_id,
            unless_cancelled=at.turn if conclusion.kind == "failed" else None,
            unless=(doors[0].turn, doors[0].step, doors[0].slot),
            # Of these the model is told that they were not executed.
            without=[end.intent for end in ends if not end.begun],
            records=(*begun.records, *doors, *lost_records),
            events=(*begun.events, *lost_events, *_completed_step(conclusion, turn), *ending.events),
            consume=begun.consume,
            consume_turn=at.turn,
            close=ending.closes,
            close_turn=at.turn,
            change=ending.change(turns=at.turn + 1, tool_calls=results_in(lost_events)),
        )

    def _begun(
        self,
        conclusion: Conclusion,
        at: Coordinates,
        row: SessionRow,
        turn: TurnJournal,
        heard: tuple[HeardDelivery, ...],
    ) -> Opening:
        """What has to be told first, if it was not: a turn that was stopped may have begun no step."""
        agent = self._agents.get(row.agent)
        model = (agent and agent.model) or "unknown"
        begin = begin_turn if conclusion.kind == "cancelled" else open_step
        return begin(at, None, heard, turn, row.agent, model)


def _as_wished(conclusion: Conclusion, row: SessionRow) -> Conclusion:
    """A turn that somebody wants stopped ends as cancelled, whatever else has happened to it."""
    if row.cancel_turn is None or row.cancel_turn > conclusion.at.turn:
        return conclusion
    return conclusion.model_copy(update={"kind": "cancelled", "failure": CANCELLATION})


def _completed_step(conclusion: Conclusion, turn: TurnJournal) -> tuple[NewEvent, ...]:
    """The model has answered the last step, and that was paid for: readers can sum up what they are told."""
    answered = [step for step in range(turn.last_step + 1) if turn.reply(step)]
    if conclusion.kind != "cancelled" or not answered:
        return ()
    return previous_step(conclusion.at.model_copy(update={"step": answered[-1] + 1}), None, turn)


def _told(facts: EventFactory, conclusion: Conclusion) -> Ending:
    tell = facts.cancelled if conclusion.kind == "cancelled" else facts.failed
    return tell(conclusion.mode, conclusion.failure)


def _doors(conclusion: Conclusion, at: Coordinates, turn: TurnJournal) -> list[NewRecord]:
    """Whatever a late attempt would write is written already: the first of them decides who has won."""
    stored = StoredFailure(failure=conclusion.failure)
    doors = [] if turn.at(at.step, names.REPLY) else [(at.step, names.REPLY)]
    doors.append((at.step, CANCELLED_SLOT if turn.at(at.step, END) else END))
    answers = not conclusion.deliveries or any(each.kind == "answer" for each in conclusion.deliveries)
    if answers and not turn.at(0, RESUME):
        doors.append((0, RESUME))
    return [written(at.turn, step, slot, FAILURE, stored) for step, slot in doors]
