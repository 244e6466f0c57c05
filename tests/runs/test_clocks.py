"""Runs on workers whose clock is wrong."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.runs import RunActivities
from perdure import RunContext
from perdure.protocol.runs import RunBody
from perdure.runtime.signals import Signals
from tests.runs.played import played


@pytest.mark.parametrize("behind", [60.0, -60.0, 0.0])
async def test_a_sleep_takes_as_long_on_a_worker_whose_clock_is_behind(behind: float) -> None:
    async def function(ctx: RunContext, _: Any) -> None:
        await ctx.sleep(10)

    async with played(function) as run:
        signals: Signals = run.drivers  # type: ignore[assignment]
        environment = ActivityEnvironment()
        now = environment.info.started_time.now(environment.info.started_time.tzinfo) + timedelta(seconds=behind)
        environment.info = replace(environment.info, started_time=now, current_attempt_scheduled_time=now)
        looked = await environment.run(RunActivities(run.harness, signals).run_body, RunBody(session_id=run.id))

        # A clock that is ahead makes the sleep longer, which is harmless: it is not looked at in vain.
        assert looked.due is not None
        assert looked.due - time.time() == pytest.approx(10 + max(0.0, behind), abs=5)
