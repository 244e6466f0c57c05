"""A turn that waits for people: its end, and the reminders that follow."""

from perdure.errors import Superseded
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.requests import ParkTurn, Reminder
from perdure.store.base import Store
from perdure.store.values import Commit, Record, SessionChange
from perdure.telemetry import spans

from .facts import Facts
from .journal import END, PARK, StoredPark, written
from .killpoints import reach
from .opening import previous_step
from .scene import find_session
from .steadfast import commit_steadfastly
from .turn_journal import TurnJournal


class Parking:
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
        done = await commit_steadfastly(self._store, await self._commit(park, turn))
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
        at, facts = park.at, Facts(park.at)
        reply = turn.reply(at.step)
        asked = [ask.request for ask in reply.asks] if reply else []
        # A turn that only carried out some answers asks nothing new, and says again what still waits.
        waiting = asked or await self._still_open(park)
        ending = facts.parked()
        after = at.model_copy(update={"step": at.step + 1})
        return Commit(
            at.session_id,
            heeds=at.turn,
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
