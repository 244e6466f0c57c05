"""Runs, whose functions are entered again and again."""

import time

from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.runs import RunLooked

from .stage import Stage, Table, hangs

RUNS = Table()

_LOOK = ("ask run_body", "run_body ends")


@RUNS.add({"": (*_LOOK, "timer", "timer fires", *_LOOK, "ends")})
async def run_that_sleeps(stage: Stage) -> None:
    stage.outside.looks = [RunLooked(due=time.time() + 1)]
    await stage.start_run()
    await stage.until("ends")


@RUNS.add({"": (*_LOOK, "signal deliver", *_LOOK, "ends")})
async def run_that_waits_for_a_delivery(stage: Stage) -> None:
    stage.outside.looks = [RunLooked()]
    run = await stage.start_run()
    await stage.until("run_body ends")
    await run.deliver("dlv_0", token="", kind="child-result", action="subagent-call:prompt:call_0")
    await stage.until("ends")


@RUNS.add({"": ("ask run_body", "signal deliver", "run_body ends", *_LOOK, "ends")})
async def run_that_gets_news_while_it_works(stage: Stage) -> None:
    """What comes while the function works makes it work once more, although it waits by then."""
    gate = stage.hold(names.RUN_BODY)
    stage.outside.looks = [RunLooked()]
    run = await stage.start_run()
    await gate.reached()
    await run.deliver("dlv_0", token="", kind="child-result", action="subagent-call:prompt:call_0")
    await stage.until("signal deliver")
    gate.open()
    await stage.until("ends")


@RUNS.add({"": (*_LOOK, "signal cancel", *_LOOK, "ends")})
async def run_cancelled_while_it_waits(stage: Stage) -> None:
    stage.outside.looks = [RunLooked(due=time.time() + 3600)]
    run = await stage.start_run()
    await stage.until("run_body ends")
    await run.handle.signal("cancel", {"turnId": "turn_0"})
    await stage.until("ends")


@RUNS.add({"": ("ask run_body", "signal cancel", "stop run_body", "run_body is stopped", *_LOOK, "ends")})
async def run_cancelled_while_it_works(stage: Stage) -> None:
    stage.outside.before[names.RUN_BODY] = hangs
    run = await stage.start_run()
    await stage.outside.until(lambda: bool(stage.outside.bodies))
    await run.handle.signal("cancel", {"turnId": "turn_0"})
    await stage.until("run_body is stopped")
    del stage.outside.before[names.RUN_BODY]
    await stage.until("ends")


@RUNS.add({"": ("run_body fails", "timer", "signal repair", *_LOOK, "ends")})
async def run_that_no_worker_can_enter(stage: Stage) -> None:
    stage.outside.looks = [ApplicationError("no", type="RUN_DIVERGED", non_retryable=True)]
    run = await stage.start_run()
    await stage.until("run_body fails", "timer")
    await run.handle.signal("repair", {"how": "retry", "reason": "OPERATOR"})
    await stage.until("ends")


@RUNS.add({"": (*_LOOK, "signal repair", *_LOOK, "ends")})
async def run_ended_by_an_operator(stage: Stage) -> None:
    stage.outside.looks = [RunLooked()]
    run = await stage.start_run()
    await stage.until("run_body ends")
    await run.handle.signal("repair", {"how": "fail", "reason": "OPERATOR"})
    await stage.until("ends")


@RUNS.add({"": (*_LOOK, "is to stop", *_LOOK, "is cancelled")})
async def run_whose_workflow_is_cancelled(stage: Stage) -> None:
    stage.outside.looks = [RunLooked()]
    run = await stage.start_run()
    await stage.until("run_body ends")
    await run.handle.cancel()
    await stage.until("is cancelled")


@RUNS.add({"": ("ask run_body", "is to stop", "stop run_body", "run_body ends", *_LOOK, "is cancelled")})
async def run_whose_workflow_is_cancelled_while_it_parks(stage: Stage) -> None:
    """The look is over before it learns of the cancel."""
    gate = stage.hold(names.RUN_BODY)
    stage.outside.looks = [RunLooked()]
    run = await stage.start_run()
    await gate.reached()
    await run.handle.cancel()
    await stage.until("stop run_body")
    gate.open()
    await stage.until("is cancelled")


@RUNS.add({"": (*_LOOK, "goes on in a new run"), "run-1": (*_LOOK, "ends")}, brief=True)
async def renewed_run(stage: Stage) -> None:
    stage.outside.looks = [RunLooked(due=0.0) for _ in range(8)]
    await stage.start_run()
    await stage.until("ends", part="run-1")
