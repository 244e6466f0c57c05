"""The function of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.runs import RunBody, RunLooked

from .attempt import attempted, current_attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness
    from perdure.runtime.signals import Signals


class RunActivities:
    def __init__(self, harness: Harness, signals: Signals) -> None:
        self.harness = harness
        self._signals = signals

    @activity.defn(name=names.RUN_BODY)
    @attempted(reports=True)
    async def run_body(self, body: RunBody) -> RunLooked:
        return await self.harness.runs.look(body, current_attempt(), self._signals, activity.wait_for_worker_shutdown)
