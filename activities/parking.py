"""Turns that wait for people, and turns that go on with their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import ParkTurn, Reminder, Resumed, ResumeTurn, Withdrawal

from . import attempts

if TYPE_CHECKING:
    from perdure.harness.parking import Parking
    from perdure.harness.resuming import Resuming
    from perdure.harness.turn_end import TurnEnd


class ParkingActivities:
    def __init__(self, parking: Parking, resuming: Resuming, end: TurnEnd) -> None:
        self._parking = parking
        self._resuming = resuming
        self._end = end

    @activity.defn(name=names.RESUME_TURN)
    async def resume_turn(self, resumption: ResumeTurn) -> Resumed:
        with attempts.translated():
            async with attempts.beating():
                return await self._resuming.resume(resumption, attempts.current())

    @activity.defn(name=names.PARK_TURN)
    async def park_turn(self, park: ParkTurn) -> None:
        with attempts.translated():
            async with attempts.beating():
                await self._parking.park(park)

    @activity.defn(name=names.WITHDRAW_INPUTS)
    async def withdraw_inputs(self, withdrawal: Withdrawal) -> None:
        with attempts.translated():
            async with attempts.beating():
                await self._end.withdraw(withdrawal)

    @activity.defn(name=names.REMIND)
    async def remind(self, reminder: Reminder) -> None:
        with attempts.translated():
            async with attempts.beating():
                await self._parking.remind(reminder)
