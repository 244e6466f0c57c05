"""Temporal in memory: it runs the real workflows, and hands the real activities to processes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from pydantic_core import from_json, to_json
from temporalio import workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    FailureError,
    TimeoutType,
    WorkflowAlreadyStartedError,
)
from temporalio.exceptions import TimeoutError as TimedOut
from temporalio.testing import ActivityEnvironment

from perdure.errors import NoDriver, Unavailable
from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from perdure.protocol.wire import JsonObject, Wire
from perdure.runtime.deploys import unserved
from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import Rebuild, Repair, SessionState
from perdure.session.view import DriverView, read_view
from perdure.store.values import SessionRow
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

from .processes import CURRENT, Died, Process, Processes

RUNNING = WorkflowExecutionStatus.RUNNING

#: Enough that a few deaths do not fail a step, and few enough that some more do.
_MOST_ATTEMPTS = 3


class _Abandoned(BaseException):
    """The workflow does not exist any more."""


class _ContinuedAsNew(BaseException):
    def __init__(self, data: Any) -> None:
        self.data = data


class Run:
    """One workflow; also what `workflow.info()` answers."""

    def __init__(self, kind: str, workflow_id: str, queue: str) -> None:
        self.kind = kind
        self.workflow_id = workflow_id
        self.task_queue = queue
        self.dead = False
        self.cancelled = False
        #: Its history has grown long.
        self.long = False
        self.activities: list[_Activity] = []
        self.task: asyncio.Task[Any] | None = None
        self.child: Run | None = None
        self.session: SessionWorkflow | None = None

    def check(self) -> None:
        if self.dead:
            raise _Abandoned

    def renew(self) -> None:
        self.long = self.cancelled = False

    def is_continue_as_new_suggested(self) -> bool:
        return self.long

    def get_current_deployment_version(self) -> None:
        """Its workers have no versions."""

    def is_target_worker_deployment_version_changed(self) -> bool:
        return False

    def get_current_history_length(self) -> int:
        return 0


class _Handle:
    """A child workflow, as its parent holds it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def cancel(self) -> None:
        if not self._run.cancelled and self._run.task is not None:
            self._run.cancelled = True
            # A child that was just started gets to its first wait before.
            asyncio.get_running_loop().call_soon(self._run.task.cancel)

    def __await__(self) -> Generator[Any, None, Any]:
        assert self._run.task is not None
        return self._result(self._run.task).__await__()

    async def _result(self, task: "asyncio.Task[Any]") -> Any:
        try:
            return await asyncio.shield(task)
        except FailureError as failed:
            error = ChildWorkflowError(
                "failed",
                namespace="",
                workflow_id=self._run.workflow_id,
                run_id="",
                workflow_type=self._run.kind,
                initiated_event_id=0,
                started_event_id=0,
                retry_state=None,
            )
            raise error from failed


_RUN: ContextVar[Run] = ContextVar("run")


class _Activity:
    """One activity: attempts in a row, of which the newest one counts."""

    def __init__(self, temporal: "Temporal", run: Run, name: str, argument: Wire, retry: RetryPolicy) -> None:
        self._temporal = temporal
        self._run = run
        self._name = name
        self._argument = argument
        self._most = min(retry.maximum_attempts, _MOST_ATTEMPTS)
        self._number = 0
        self._cancelled = False
        self._process: Process | None = None
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # It may be that no task awaits it any more.
        self.result.add_done_callback(lambda done: done.exception())

    def attempt(self) -> None:
        self._number += 1
        environment = ActivityEnvironment()
        environment.info = replace(
            environment.info,
            attempt=self._number,
            workflow_type=self._run.kind,
            current_attempt_scheduled_time=self._temporal.scheduled(),
        )
        function = self._temporal.worker(self._name)
        argument = type(self._argument).model_validate_json(self._argument.model_dump_json())
        process = self._temporal.processes.start(
            f"{self._name} #{self._number}", lambda: environment.run(function, argument)
        )
        process.argument = argument
        process.notice = environment.cancel
        process.lost = self.lose
        assert process.task is not None
        process.task.add_done_callback(lambda task: self._ended(process, task))
        self._process = process

    @property
    def stops(self) -> bool:
        """Whether its attempt is to notice that it should stop."""
        return self._cancelled and not self.result.done()

    def cancel(self) -> None:
        if self._cancelled or self.result.done():
            return
        self._cancelled = True
        process = self._process
        if process is not None and not process.begun and process.task is not None:
            # No worker has taken it yet, and none will.
            self._process = None
            process.task.cancel()
            self._fail(CancelledError("cancelled"), again=False)

    def lose(self) -> None:
        """The attempt is taken for dead; it may well live on."""
        if self._process is not None:
            self._process.zombie = True
            self._process = None
            self._fail(_timeout(), again=True)

    def abandon(self) -> Process | None:
        process, self._process = self._process, None
        return process

    def error(self, cause: BaseException) -> ActivityError:
        error = ActivityError(
            self._name,
            scheduled_event_id=0,
            started_event_id=0,
            identity="",
            activity_type=self._name,
            activity_id="",
            retry_state=None,
        )
        error.__cause__ = cause
        return error

    def _ended(self, process: Process, task: "asyncio.Task[Any]") -> None:
        failure: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        if process is not self._process:
            return
        self._process = None
        match failure:
            case None:
                self.result.set_result(task.result())
            case Died():
                self._fail(_timeout(), again=True)
            case asyncio.CancelledError() if self._cancelled:
                self._fail(CancelledError("cancelled"), again=False)
            case ApplicationError():
                self._fail(failure, again=not failure.non_retryable)
            case _:
                self._temporal.processes.faults.append(failure)
                self._fail(ApplicationError(repr(failure)), again=False)

    def _fail(self, cause: BaseException, *, again: bool) -> None:
        if again and not self._cancelled and not self._run.dead and (not self._most or self._number < self._most):
            self.attempt()
        else:
            self.result.set_exception(self.error(cause))


def _as_json(value: Wire | JsonObject) -> str:
    return value.model_dump_json() if isinstance(value, Wire) else json.dumps(value)


def _timeout() -> TimedOut:
    return TimedOut("heartbeat", type=TimeoutType.HEARTBEAT, last_heartbeat_details=())


class Temporal:
    """All workflows, and what `temporalio.workflow` is to their code."""

    ActivityCancellationType = workflow.ActivityCancellationType
    ContinueAsNewVersioningBehavior = workflow.ContinueAsNewVersioningBehavior
    logger = logging.getLogger(__name__)
    unsafe = SimpleNamespace(is_replaying=lambda: False)

    def __init__(
        self, processes: Processes, now: Callable[[], float], workers: Sequence[Mapping[str, Callable[..., Any]]]
    ) -> None:
        self.processes = processes
        self.runs: dict[str, Run] = {}
        self.statuses: dict[str, WorkflowExecutionStatus] = {}
        #: What drivers that continued as new were given.
        self.inputs: list[JsonObject] = []
        self._workers = workers
        self._now = now
        self._scheduled = 0
        self._all: list[Run] = []

    # --- what the test does with it ---

    def scheduled(self) -> datetime:
        self._scheduled += 1
        return datetime.fromtimestamp(self._scheduled, UTC)

    def worker(self, name: str) -> Callable[..., Any]:
        """Every attempt is made by another process than the one before."""
        return self._workers[self._scheduled % len(self._workers)][name]

    def start(self, data: JsonObject) -> None:
        """Start the driver of a session."""
        session_id = data["sessionId"]
        run = Run(names.SESSION_WORKFLOW, session_id, names.queue("perdure", names.SESSIONS_QUEUE))
        run.session = self._made(run, data)
        self.runs[session_id], self.statuses[session_id] = run, RUNNING
        self._begin(run, self._drive(run, data))

    def lose(self, session_id: str) -> list[Process]:
        """All that Temporal knows of the session is gone; what works for it at this moment is not."""
        run = self.runs.pop(session_id)
        del self.statuses[session_id]
        left: list[Process] = []
        for each in filter(None, (run, run.child)):
            each.dead = True
            left += [process for activity in each.activities if (process := activity.abandon())]
        for process in left:
            process.zombie = True
        return left

    def stopping(self) -> list[Process]:
        """Processes that are to notice that they should stop."""
        known = [activity for run in self._all for activity in run.activities if activity.stops]
        return [process for process in self.processes.alive if process.begun and process.lost in _losers(known)]

    async def end(self) -> None:
        for run in self._all:
            run.dead = True
            for activity in run.activities:
                activity.abandon()
                if not activity.result.done():
                    activity.result.set_exception(Died())
        await self.processes.end()
        await asyncio.gather(*(run.task for run in self._all if run.task is not None), return_exceptions=True)

    def _begin(self, run: Run, work: Any) -> None:
        self._all.append(run)

        async def live() -> Any:
            CURRENT.set(None)
            _RUN.set(run)
            try:
                return await work
            except (_Abandoned, Died, asyncio.CancelledError, FailureError):
                raise
            except BaseException as fault:
                self.processes.faults.append(fault)
                raise

        run.task = asyncio.get_running_loop().create_task(live())
        run.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    def _made(self, run: Run, data: JsonObject) -> SessionWorkflow:
        """A driver of its own run, from any caller's context."""

        def make() -> SessionWorkflow:
            _RUN.set(run)
            return SessionWorkflow(data)

        return copy_context().run(make)

    async def _drive(self, run: Run, data: JsonObject) -> None:
        while True:
            assert run.session is not None
            try:
                await run.session.run(data)
            except _ContinuedAsNew as again:
                data = from_json(to_json(again.data))
                self.inputs.append(data)
                run.renew()
                run.session = SessionWorkflow(data)
                continue
            self.statuses[run.workflow_id] = WorkflowExecutionStatus.COMPLETED
            return

    async def _turn(self, run: Run, order: TurnRequest | JsonObject) -> TurnResult:
        while True:
            request = TurnRequest.model_validate_json(_as_json(order))
            try:
                result = await TurnWorkflow().run(request)
                return TurnResult.model_validate_json(result.model_dump_json())
            except _ContinuedAsNew as again:
                order = again.data
                run.renew()

    # --- what workflows ask for ---

    def info(self) -> Run:
        return _RUN.get()

    def time(self) -> float:
        return self._now()

    def cancellation_reason(self) -> str | None:
        return "cancelled" if _RUN.get().cancelled else None

    def patched(self, name: str) -> bool:
        return True

    def continue_as_new(self, data: Any, **options: Any) -> None:
        raise _ContinuedAsNew(data)

    async def sleep(self, pause: timedelta) -> None:
        _RUN.get().check()
        await self.processes.condition(lambda: False, self._now() + pause.total_seconds())

    async def wait_condition(self, holds: Callable[[], bool], *, timeout: timedelta | None = None) -> None:  # noqa: ASYNC109
        _RUN.get().check()
        deadline = None if timeout is None else self._now() + timeout.total_seconds()
        if not await self.processes.condition(holds, deadline):
            raise TimeoutError

    async def execute_activity(
        self,
        name: str,
        argument: Any,
        *,
        retry_policy: RetryPolicy,
        cancellation_type: workflow.ActivityCancellationType = workflow.ActivityCancellationType.TRY_CANCEL,
        **options: Any,
    ) -> Any:
        run = _RUN.get()
        run.check()
        activity = _Activity(self, run, name, argument, retry_policy)
        run.activities.append(activity)
        activity.attempt()
        while True:
            try:
                return await asyncio.shield(activity.result)
            except asyncio.CancelledError:
                run.check()
                activity.cancel()
                waits = cancellation_type is workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
                if not (waits or activity.result.done()):
                    raise activity.error(CancelledError("cancelled")) from None

    async def start_child_workflow(
        self, name: str, order: TurnRequest | JsonObject, *, id: str, task_queue: str, **options: Any
    ) -> _Handle:
        parent = _RUN.get()
        parent.check()
        if parent.child is not None and parent.child.task is not None and not parent.child.task.done():
            raise WorkflowAlreadyStartedError(id, name)
        parent.child = Run(names.TURN_WORKFLOW, id, task_queue)
        self._begin(parent.child, self._turn(parent.child, order))
        return _Handle(parent.child)


def _losers(activities: Sequence[_Activity]) -> list[Callable[[], None]]:
    return [activity.lose for activity in activities]


class PlayedDriver(DriverClient):
    """Drivers as the API sees them; the process that asks may die just then, or find Temporal away."""

    def __init__(self, temporal: Temporal) -> None:
        super().__init__(cast("Client", None), "perdure")
        self._temporal = temporal

    async def start(self, state: SessionState, *, summary: str | None = None, lane_of: str | None = None) -> None:
        self._reach()
        if state.session_id not in self._temporal.statuses:
            self._temporal.start(state.model_dump(mode="json"))
        self._answer()

    async def rebuild(
        self, session_id: str, rebuild: Rebuild, *, unattended: bool = False, of: SessionRow | None = None
    ) -> None:
        self._reach()
        if self._temporal.statuses.get(session_id) is not RUNNING:
            self._temporal.start(SessionState.to_rebuild(session_id, rebuild).model_dump(mode="json"))
        self._answer()

    async def unreplayable(self) -> Mapping[str, unserved.Run] | None:
        return None

    async def deliver(self, session_id: str, ref: JsonObject) -> None:
        self._signalled(session_id).deliver(ref)
        self._answer()

    async def describe(self, session_id: str) -> DriverView | None:
        described = self._signalled(session_id).describe()
        self._answer()
        return read_view(described)

    async def repair(self, session_id: str, how: Repair, reason: str = "OPERATOR") -> None:
        self._signalled(session_id).repair({"how": how, "reason": reason})
        self._answer()

    async def cancel(self, session_id: str, turn_id: str, until: str | None = None) -> None:
        self._signalled(session_id).cancel(
            {"turnId": turn_id} if until is None else {"turnId": turn_id, "until": until}
        )
        self._answer()

    async def status(self, session_id: str) -> WorkflowExecutionStatus | None:
        self._reach()
        return self._temporal.statuses.get(session_id)

    async def running(self) -> AsyncIterator[str]:
        self._reach()
        for session_id, status in sorted(self._temporal.statuses.items()):
            if status is RUNNING:
                yield session_id

    async def terminate(self, session_id: str, reason: str) -> None:
        raise NotImplementedError

    def _signalled(self, session_id: str) -> SessionWorkflow:
        self._reach()
        run = self._temporal.runs.get(session_id)
        if run is None or run.session is None or self._temporal.statuses[session_id] is not RUNNING:
            raise NoDriver
        return run.session

    def _reach(self) -> None:
        process = CURRENT.get()
        match process.fate if process is not None else "lives":
            case "lives" | "answer is lost":
                return
            case "dies":
                self._temporal.processes.die_here()
            case "temporal is away":
                raise Unavailable("Temporal is away.")

    def _answer(self) -> None:
        process = CURRENT.get()
        if process is not None and process.fate == "answer is lost":
            raise Unavailable("Temporal did not answer in time.")
