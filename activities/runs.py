"""The function of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.runs import RunBody, RunLooked

from .attempt import attempted, current_attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness
    from perdure.runtime.signals import Signals


#: Seconds by which the clock of this worker may be behind that of Temporal.
_TOLERATED = 1.0


class RunActivities:
    def __init__(self, harness: Harness, signals: Signals) -> None:
        self.harness = harness
        self._signals = signals

    @activity.defn(name=names.RUN_BODY)
    @attempted(reports=True)
    async def run_body(self, body: RunBody) -> RunLooked:
        behind = activity.info().started_time.timestamp() - time.time()
        attempt = current_attempt(self.harness.worker)
        looked = await self.harness.runs.look(body, attempt, self._signals, activity.wait_for_worker_shutdown)
        if looked.due is None or behind < _TOLERATED:
            return looked
        # By the clock of the workflow: by ours, it would have the function entered again and again until then.
        return looked.model_copy(update={"due": looked.due + behind})
