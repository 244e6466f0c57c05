"""The workflow of a run: it has the function entered, and waits without using any compute while that waits."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, is_cancelled_exception

from perdure.protocol import names
from perdure.protocol.requests import Failure
from perdure.protocol.runs import RunBody, RunLooked, RunState
from perdure.protocol.wire import JsonObject
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_FAILED, read_repair

from . import versions

#: It continues as new once its history has this many events, at a moment in which it waits.
_LONG_RUN = 200

#: Seconds until the function is entered again after no worker could: the first pause, and the longest.
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 600.0

#: A step may take long. The death of a worker is noticed by its missing heartbeat.
_START_TO_CLOSE = timedelta(days=1)
_HEARTBEAT = timedelta(seconds=5)
_RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10))


@workflow.defn(name=names.RUN_WORKFLOW)
class RunWorkflow:
    """No author's code runs here: the function is entered in an activity, which looks up what it has done before."""

    @workflow.init
    def __init__(self, data: JsonObject) -> None:
        self._run_id = workflow.info().workflow_id
        self._data = data
        self._ends = _ends(data)
        # Whether something has come since the function was entered last.
        self._news = True
        self._body: workflow.ActivityHandle[RunLooked] | None = None

    @workflow.signal(name=names.DELIVER)
    def deliver(self, *data: Any) -> None:
        """Something was delivered, and is in the store; or another build is current."""
        self._news = True

    @workflow.signal(name=names.CANCEL)
    def cancel(self, *data: Any) -> None:
        """The store has a request to cancel the run."""
        self._interrupt()

    @workflow.signal(name=names.REPAIR)
    def repair(self, *data: Any) -> None:
        """Carry out an operator's order."""
        order = read_repair(data[0] if data else None)
        if order is None:
            workflow.logger.warning("A repair of unknown kind was ignored")
        elif order.how == "fail":
            self._ends = OPERATOR_FAILED
            self._interrupt()
        else:
            self._news = True

    @workflow.query(name=names.DESCRIBE)
    def describe(self) -> JsonObject:
        return {"runId": self._run_id, "inBody": self._body is not None}

    @workflow.run
    async def run(self, data: JsonObject) -> None:
        try:
            await self._live()
        except asyncio.CancelledError:
            if workflow.cancellation_reason() is None:
                raise
            self._ends = OPERATOR_CANCELLED
            while not (looked := await self._enter()) or not looked.ended:
                await workflow.sleep(_FIRST_PAUSE)
            raise

    async def _live(self) -> None:
        tries = 0
        while True:
            self._news = False
            looked = await self._enter()
            if looked is not None and looked.ended:
                return
            tries = 0 if looked is not None else tries + 1
            await self._wait(looked, tries)
            if self._is_long():
                ends = None if self._ends is None else self._ends.model_dump(mode="json")
                versions.continue_as_new({**self._data, "runId": self._run_id, "ends": ends})

    async def _enter(self) -> RunLooked | None:
        """Have the function entered; None when no worker could, or when it was interrupted."""
        self._body = workflow.start_activity(
            names.RUN_BODY,
            RunBody(session_id=self._run_id, ends=self._ends),
            task_queue=names.sibling(workflow.info().task_queue, names.BODIES_QUEUE),
            result_type=RunLooked,
            start_to_close_timeout=_START_TO_CLOSE,
            heartbeat_timeout=_HEARTBEAT,
            retry_policy=_RETRY,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary="end" if self._ends else "enter",
        )
        looked: RunLooked | None = None
        try:
            looked = await self._body
        except ActivityError as error:
            if is_cancelled_exception(error) and self._is_cancelled():
                raise asyncio.CancelledError from error
        finally:
            self._body = None
        done = looked is not None and looked.ended
        # The function may park, or fail, before it learns of the cancel: then nothing raises here.
        if not done and self._is_cancelled() and workflow.patched("run-hears-late-cancel"):
            raise asyncio.CancelledError
        return looked

    def _is_cancelled(self) -> bool:
        """Whether the workflow was cancelled in Temporal, and does not end the run yet."""
        return workflow.cancellation_reason() is not None and self._ends is None

    async def _wait(self, looked: RunLooked | None, tries: int) -> None:
        """Wait for news, and no longer than until the next look is due."""
        if looked is None:
            seconds: float | None = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(tries - 1, 16))
        else:
            seconds = None if looked.due is None else max(0.0, looked.due - workflow.time())
        timeout = None if seconds is None else timedelta(seconds=seconds)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._news or versions.is_suggested(), timeout=timeout)

    def _interrupt(self) -> None:
        self._news = True
        if self._body is not None:
            self._body.cancel()

    def _is_long(self) -> bool:
        return versions.is_suggested() or workflow.info().get_current_history_length() >= _LONG_RUN


def _ends(data: JsonObject) -> Failure | None:
    try:
        return RunState.model_validate(data).ends
    except ValidationError:
        return None
