"""What is told when no step could tell it: a turn that failed or was stopped, a delivery that nobody will hear."""

from collections.abc import Sequence

from perdure import telemetry
from perdure.agents.registry import AgentRegistry
from perdure.errors import SessionGone
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.requests import Conclusion, Coordinates, Refusal, Withdrawal
from perdure.session.turn import CANCELLED as CANCELLATION
from perdure.store.base import Commit, DeliveryTaken, NewRecord, Record, SessionChange, SessionRow, Store

from .facts import Ending, Facts
from .journal import CANCELLED, END, FAILURE, RESUME, HeardDelivery, StoredFailure, written
from .loose_ends import LooseEnd, loose_ends, tied, withdrawals
from .opening import Opening, begin_turn, hear, open_step
from .turn_journal import TurnJournal


class TurnEnd:
    """Has the last word on a turn; saying it twice is saying it once."""

    def __init__(self, store: Store, agents: AgentRegistry) -> None:
        self._store = store
        self._agents = agents

    async def conclude(self, conclusion: Conclusion) -> None:
        """End a turn that failed or was cancelled, unless it has ended already."""
        row = await self._store.session(conclusion.at.session_id)
        if row is None:
            # Deleted meanwhile: there is nobody left to tell.
            return
        while await self._unfinished(conclusion, row):
            pass

    async def withdraw(self, withdrawal: Withdrawal) -> None:
        """Cancel a turn that waits for people."""
        row = await self._store.session(withdrawal.at.session_id)
        if row is None:
            return
        # Turns that found nothing to do were never told; the one that parked stands before them.
        parked = withdrawal.at.model_copy(update={"turn": min(withdrawal.at.turn, max(0, row.turns - 1))})
        await self.conclude(Conclusion(kind="cancelled", at=parked, mode=withdrawal.mode, failure=CANCELLATION))

    async def refuse(self, refusal: Refusal) -> None:
        """Say that no turn will hear a delivery, and why."""
        event = NewEvent(
            type=EventType.DELIVERY_REFUSED,
            key=names.session_key(f"refused/{refusal.delivery_id}"),
            data={"deliveryId": refusal.delivery_id, "code": refusal.code, "message": refusal.message},
            delivery_ids=(refusal.delivery_id,),
        )
        try:
            await self._store.refuse(refusal.session_id, refusal.delivery_id, refusal.code, event)
        except SessionGone:
            return

    async def _unfinished(self, conclusion: Conclusion, row: SessionRow) -> bool:
        """Try to end the turn; whether somebody came in between."""
        at = conclusion.at
        turn = await self._turn(at.session_id, at.turn)
        if turn.over and not (conclusion.kind == "cancelled" and turn.parked):
            await self._store.commit(Commit(row.session_id, close_turn=at.turn))
            return False
        heard, turn = await hear(self._store, at, [each.id for each in conclusion.deliveries], turn)
        ends = loose_ends(at.session_id, [*await self._waiting(at), (at.turn, turn)])
        nobody = not (heard or ends or turn.resumption)
        if nobody and not conclusion.failure.structural and conclusion.mode == "conversation":
            # Nothing was accepted, so nobody waits for a boundary.
            return False
        await self._withdraw(row, ends)
        # A call that people had approved holds its place in the turn that asked for it: no late attempt keeps that.
        for number in sorted({end.at.turn for end in ends if end.begun} - {at.turn}):
            await self._store.commit(Commit(row.session_id, close_turn=number))
        try:
            done = await self._store.commit(self._ending(conclusion, row, turn, heard, ends))
        except DeliveryTaken:
            return True
        if done.existing is None:
            telemetry.turn_ended(row.agent, conclusion.kind)
        return done.existing is not None

    async def _turn(self, session_id: str, turn: int) -> TurnJournal:
        records: list[Record] = list(await self._store.records(session_id, from_turn=turn, to_turn=turn))
        return TurnJournal(records)

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
            unless=(doors[0].turn, doors[0].step, doors[0].slot),
            records=(*begun.records, *doors, *lost_records),
            events=(*begun.events, *lost_events, *ending.events),
            consume=begun.consume,
            consume_turn=at.turn,
            close=ending.closes,
            close_turn=at.turn,
            change=SessionChange(status=ending.status, error=ending.error, turns=at.turn + 1),
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
