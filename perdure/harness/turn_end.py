"""What is told when no step could tell it: a turn that failed or was stopped, a delivery that nobody will hear."""

import logging
from collections.abc import Sequence

from perdure.agents.registry import AgentRegistry
from perdure.errors import NeedsAttention, TurnCancelled, UnreadableState
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, delivery_refused
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    Attention,
    CloseSession,
    Concluded,
    Conclusion,
    Coordinates,
    Parked,
    Refusal,
    Withdrawal,
)
from perdure.session.turn import CANCELLED as CANCELLATION
from perdure.store.base import Store
from perdure.store.values import Begun, Commit, DeliveryTaken, InputQuery, NewRecord, Record, SessionChange, SessionRow
from perdure.telemetry import spans

from .facts import Ending, Facts, results_in
from .journal import CANCELLED, END, FAILURE, RESUME, HeardDelivery, StoredFailure, model_outcome, written
from .loose_ends import LooseEnd, loose_ends, tied, withdrawals
from .opening import Opening, begin_turn, hear, open_step, previous_step
from .scene import find_session
from .turn_journal import TurnJournal

log = logging.getLogger("perdure.harness")


class TurnEnd:
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
        while not row.over and await self._unfinished(_as_wished(conclusion, row), row):
            row = await find_session(self._store, session_id)
        row = await find_session(self._store, session_id)
        return Concluded(
            token_hash=await self._store.token_of(session_id),
            head=row.events,
            silent=row.turns <= conclusion.at.turn,
            over=row.over,
            open=() if row.over else await self._parked_on(conclusion.at),
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
        if row.over:
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
        facts = Facts(at)
        ending = _told(facts, conclusion)
        begun = self._begun(conclusion, at, row, turn, heard)
        doors = _doors(conclusion, at, turn)
        lost_records, lost_events = tied(facts, conclusion, ends)
        return Commit(
            row.session_id,
            heeds=at.turn if conclusion.kind == "failed" else None,
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


def _told(facts: Facts, conclusion: Conclusion) -> Ending:
    tell = facts.cancelled if conclusion.kind == "cancelled" else facts.failed
    return tell(conclusion.mode, conclusion.failure)


def _doors(conclusion: Conclusion, at: Coordinates, turn: TurnJournal) -> list[NewRecord]:
    """Whatever a late attempt would write is written already: the first of them decides who has won."""
    stored = StoredFailure(failure=conclusion.failure)
    doors = [] if turn.at(at.step, names.REPLY) else [(at.step, names.REPLY)]
    doors.append((at.step, CANCELLED if turn.at(at.step, END) else END))
    answers = not conclusion.deliveries or any(each.kind == "answer" for each in conclusion.deliveries)
    if answers and not turn.at(0, RESUME):
        doors.append((0, RESUME))
    return [written(at.turn, step, slot, FAILURE, stored) for step, slot in doors]
