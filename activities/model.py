"""One model call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome

from .attempt import attempted, current_attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


class ModelActivities:
    def __init__(self, harness: Harness) -> None:
        self.harness = harness

    @activity.defn(name=names.CALL_MODEL)
    @attempted()
    async def call_model(self, call: ModelCall) -> ModelOutcome:
        outcome = await self.harness.call_model(call, current_attempt(self.harness.worker))
        if isinstance(outcome, Finished) and outcome.failure:
            return outcome.model_copy(update={"failure": outcome.failure.bare()})
        return outcome
