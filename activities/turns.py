"""What happens to a turn beside its steps, and to a session beside its turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import (
    AttendSession,
    CloseSession,
    Concluded,
    Conclusion,
    ParkTurn,
    RebuildSession,
    Refusal,
    Reminder,
    Resumed,
    ResumeTurn,
    Withdrawal,
)
from perdure.protocol.wire import JsonObject

from .attempt import attempt, current

if TYPE_CHECKING:
    from perdure.harness.rebuild import SessionRebuilder
    from perdure.harness.resume import TurnResumer
    from perdure.harness.turn import TurnEnder, TurnParker


class TurnActivities:
    """Each is one method of the harness."""

    def __init__(
        self, parking: TurnParker, resuming: TurnResumer, end: TurnEnder, rebuilding: SessionRebuilder
    ) -> None:
        self._parking = parking
        self._resuming = resuming
        self._end = end
        self._rebuilding = rebuilding

    @activity.defn(name=names.RESUME_TURN)
    async def resume_turn(self, resumption: ResumeTurn) -> Resumed:
        async with attempt():
            resumed = await self._resuming.resume(resumption, current())
            failure = resumed.failure and resumed.failure.bare()
            return resumed.model_copy(update={"failure": failure})

    @activity.defn(name=names.PARK_TURN)
    async def park_turn(self, park: ParkTurn) -> None:
        async with attempt():
            await self._parking.park(park)

    @activity.defn(name=names.CONCLUDE_TURN)
    async def conclude_turn(self, conclusion: Conclusion) -> Concluded:
        async with attempt(lambda error: self._end.attend(conclusion.at.session_id, error)):
            return await self._end.conclude(conclusion)

    @activity.defn(name=names.WITHDRAW_INPUTS)
    async def withdraw_inputs(self, withdrawal: Withdrawal) -> None:
        async with attempt(lambda error: self._end.attend(withdrawal.at.session_id, error)):
            await self._end.withdraw(withdrawal)

    @activity.defn(name=names.REMIND)
    async def remind(self, reminder: Reminder) -> None:
        async with attempt(lambda error: self._end.attend(reminder.session_id, error)):
            await self._parking.remind(reminder)

    @activity.defn(name=names.REFUSE_DELIVERY)
    async def refuse_delivery(self, refusal: Refusal) -> None:
        async with attempt(lambda error: self._end.attend(refusal.session_id, error)):
            await self._end.refuse(refusal)

    @activity.defn(name=names.ATTEND_SESSION)
    async def attend_session(self, attend: AttendSession) -> None:
        async with attempt():
            await self._end.mark(attend.session_id, attend.attention, attend.turn)

    @activity.defn(name=names.CLOSE_SESSION)
    async def close_session(self, close: CloseSession) -> None:
        async with attempt(lambda error: self._end.attend(close.session_id, error)):
            await self._end.close(close)

    @activity.defn(name=names.REBUILD_SESSION)
    async def rebuild_session(self, rebuild: RebuildSession) -> JsonObject | None:
        async with attempt(lambda error: self._end.attend(rebuild.session_id, error)):
            state = await self._rebuilding.rebuild(rebuild, current())
            # As JSON: the driver may be older, and must not lose what it does not know.
            return None if state is None else state.model_dump(mode="json")
