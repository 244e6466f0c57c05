"""What is told when no step could tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import Conclusion, Refusal

from . import attempts

if TYPE_CHECKING:
    from perdure.harness.turn_end import TurnEnd


class EndingActivities:
    def __init__(self, end: TurnEnd) -> None:
        self._end = end

    @activity.defn(name=names.CONCLUDE_TURN)
    async def conclude_turn(self, conclusion: Conclusion) -> None:
        with attempts.translated():
            async with attempts.beating():
                await self._end.conclude(conclusion)

    @activity.defn(name=names.REFUSE_DELIVERY)
    async def refuse_delivery(self, refusal: Refusal) -> None:
        with attempts.translated():
            async with attempts.beating():
                await self._end.refuse(refusal)
