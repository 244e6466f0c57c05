"""One model call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome

from .attempt import attempt, current

if TYPE_CHECKING:
    from perdure.harness.model_call import ModelCaller


class ModelActivities:
    def __init__(self, step: ModelCaller) -> None:
        self._step = step

    @activity.defn(name=names.CALL_MODEL)
    async def call_model(self, call: ModelCall) -> ModelOutcome:
        async with attempt():
            outcome = await self._step.run(call, current())
            if isinstance(outcome, Finished) and outcome.failure:
                return outcome.model_copy(update={"failure": outcome.failure.bare()})
            return outcome
