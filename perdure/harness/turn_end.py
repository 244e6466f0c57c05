"""What is told when no step could tell it: a turn that failed from outside, a delivery that nobody will hear."""

from perdure.agents.registry import AgentRegistry
from perdure.errors import SessionGone
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.requests import Conclusion, Refusal
from perdure.store.base import Commit, DeliveryTaken, NewRecord, Record, SessionChange, SessionRow, Store

from . import outputs
from .facts import Facts
from .journal import END, FAILURE, OUTCOME, HeardDelivery, StoredFailure, TurnJournal, written
from .opening import hear, open_step
from .prompt import INTERRUPTED, NOT_EXECUTED


class TurnEnd:
    """Has the last word on a turn; saying it twice is saying it once."""

    def __init__(self, store: Store, agents: AgentRegistry) -> None:
        self._store = store
        self._agents = agents

    async def conclude(self, conclusion: Conclusion) -> None:
        """End a turn with a failure, unless it has ended already."""
        row = await self._store.session(conclusion.at.session_id)
        if row is None:
            # Deleted meanwhile: there is nobody left to tell.
            return
        while await self._unfinished(conclusion, row):
            pass

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
        turn = await self._turn(conclusion)
        if turn.over:
            await self._store.commit(Commit(row.session_id, close_turn=conclusion.at.turn))
            return False
        heard, turn = await hear(self._store, conclusion.at, conclusion.deliveries, turn)
        if not heard and not conclusion.failure.structural and conclusion.mode == "conversation":
            # Nothing was accepted, so nobody waits for a boundary.
            return False
        try:
            done = await self._store.commit(self._ending(conclusion, row, turn, heard))
        except DeliveryTaken:
            return True
        return done.existing is not None

    async def _turn(self, conclusion: Conclusion) -> TurnJournal:
        at = conclusion.at
        records: list[Record] = list(await self._store.records(at.session_id, from_turn=at.turn, to_turn=at.turn))
        return TurnJournal(records)

    def _ending(
        self, conclusion: Conclusion, row: SessionRow, turn: TurnJournal, heard: tuple[HeardDelivery, ...]
    ) -> Commit:
        # The driver may not know how far the turn has come.
        step = max(conclusion.at.step, turn.last_step)
        at = conclusion.at.model_copy(update={"step": step})
        slot = END if turn.reply(step) else names.REPLY
        failed = written(at.turn, step, slot, FAILURE, StoredFailure(failure=conclusion.failure))
        facts = Facts(at)
        ending = facts.failed(conclusion.mode, conclusion.failure)
        agent = self._agents.get(row.agent)
        begun = open_step(at, None, heard, turn, row.agent, (agent and agent.model) or "unknown")
        lost_records, lost_events = _lost_calls(facts, turn, step)
        return Commit(
            row.session_id,
            unless=(at.turn, step, slot),
            records=(*begun.records, failed, *lost_records),
            events=(*begun.events, *lost_events, *ending.events),
            consume=begun.consume,
            consume_turn=at.turn,
            close=ending.closes,
            close_turn=at.turn,
            change=SessionChange(status=ending.status, error=ending.error, turns=at.turn + 1),
        )


def _lost_calls(facts: Facts, turn: TurnJournal, step: int) -> tuple[list[NewRecord], list[NewEvent]]:
    """An outcome for each call that has none, so that no late attempt can still have one."""
    records: list[NewRecord] = []
    events: list[NewEvent] = []
    reply = turn.reply(step)
    for call in reply.calls if reply else ():
        if call.ref is None or turn.outcome(step, call.call_id):
            continue
        begun = turn.interrupted(step, call.call_id)
        outcome = outputs.failed(INTERRUPTED if begun else NOT_EXECUTED, outputs.UNKNOWN, "unknown")
        slot = names.outcome_slot(call.call_id)
        records.append(written(facts.at.turn, step, slot, OUTCOME, outcome))
        events.append(facts.action_result(call.call_id, call.tool, outcome))
    return records, events
