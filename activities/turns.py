"""The activities of a turn beside its steps, and of a session beside its turns."""

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

from .attempt import attempted, current_attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


class TurnActivities:
    """Short work on the store. Those that drivers execute set the session's attention when no worker can do them."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness

    @activity.defn(name=names.RESUME_TURN)
    @attempted()
    async def resume_turn(self, resumption: ResumeTurn) -> Resumed:
        resumed = await self.harness.resume_turn(resumption, current_attempt(self.harness.worker))
        failure = resumed.failure and resumed.failure.bare()
        return resumed.model_copy(update={"failure": failure})

    @activity.defn(name=names.PARK_TURN)
    @attempted()
    async def park_turn(self, park: ParkTurn) -> None:
        await self.harness.park_turn(park)

    @activity.defn(name=names.PARK_PROGRAMS)
    @attempted()
    async def park_programs(self, park: ParkTurn) -> None:
        await self.harness.park_turn(park)

    @activity.defn(name=names.CONCLUDE_TURN)
    @attempted(reports=True)
    async def conclude_turn(self, conclusion: Conclusion) -> Concluded:
        return await self.harness.conclude_turn(conclusion)

    @activity.defn(name=names.WITHDRAW_INPUTS)
    @attempted(reports=True)
    async def withdraw_inputs(self, withdrawal: Withdrawal) -> None:
        await self.harness.withdraw_inputs(withdrawal)

    @activity.defn(name=names.REMIND)
    @attempted(reports=True)
    async def remind(self, reminder: Reminder) -> None:
        await self.harness.remind(reminder)

    @activity.defn(name=names.REFUSE_DELIVERY)
    @attempted(reports=True)
    async def refuse_delivery(self, refusal: Refusal) -> None:
        await self.harness.refuse_delivery(refusal)

    @activity.defn(name=names.ATTEND_SESSION)
    @attempted()
    async def attend_session(self, attend: AttendSession) -> None:
        await self.harness.attend_session(attend)

    @activity.defn(name=names.CLOSE_SESSION)
    @attempted(reports=True)
    async def close_session(self, close: CloseSession) -> bool | None:
        closed = await self.harness.close_session(close)
        # Only drivers that ask expect a result.
        return closed if close.if_idle else None

    @activity.defn(name=names.REBUILD_SESSION)
    @attempted(reports=True)
    async def rebuild_session(self, rebuild: RebuildSession) -> JsonObject | None:
        state = await self.harness.rebuild_session(rebuild, current_attempt(self.harness.worker))
        # As JSON: the driver may run an older build, and must not lose fields that it does not know.
        return None if state is None else state.model_dump(mode="json")
