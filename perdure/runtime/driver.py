"""The workflows that drive sessions, through a Temporal client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

from pydantic import ValidationError
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError, WorkflowQueryRejectedError
from temporalio.common import QueryRejectCondition, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import DriverRefused, NoDriver, NoWorker, PerdureError, Unavailable
from perdure.protocol import names
from perdure.protocol.wire import JsonObject, Wire
from perdure.session.state import Rebuild, Repair, RepairOrder, SessionState

from .connect import ABSENT, NOT_FOR_US, RPC_PATIENCE, in_time, namespace_missing

T = TypeVar("T")

#: How long a list of all running drivers may take, in seconds.
_LIST_SECONDS = 60.0

#: For how many seconds a task queue that had a worker is assumed to have one.
_WORKER_SEEN = 10.0

#: Errors that mean that Temporal cannot be reached by this process. All others concern one session.
_UNREACHABLE = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.UNAUTHENTICATED,
    RPCStatusCode.PERMISSION_DENIED,
)

#: Errors of a query that no worker answers.
_UNANSWERED = (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.CANCELLED)


class _Ref(Wire):
    id: str


class _Held(Wire):
    deliveries: tuple[_Ref, ...] = ()


class DriverView(Wire):
    """A driver's answer to the query `describe`. Another build may leave out fields, which then have defaults."""

    inbox: tuple[_Ref, ...] = ()
    seen: tuple[str, ...] = ()
    held: _Held | None = None
    in_turn: tuple[str, ...] = ()
    idle: bool = False
    turn: int = 0
    told: int | None = None
    head: int | None = None

    @property
    def holds(self) -> frozenset[str]:
        """The ids of the deliveries that the driver has not finished."""
        refs = [*self.inbox, *(self.held.deliveries if self.held else ())]
        return frozenset([*self.in_turn, *(ref.id for ref in refs)])

    @property
    def dropped(self) -> frozenset[str]:
        """The ids of the deliveries that the driver takes for done. Unknown, so empty, while it runs a turn."""
        return frozenset(self.seen) - self.holds if self.is_idle else frozenset()

    def is_behind(self, turns: int) -> bool:
        """Whether the session has begun more turns than the driver knows."""
        return self.is_idle and turns > (self.turn if self.told is None else self.told)

    @property
    def is_idle(self) -> bool:
        return self.idle and self.held is None


class Driver:
    """The drivers of all sessions. Raises `NoDriver` when there is none, `Unavailable` without Temporal."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self._client = client
        self._queue = names.queue(task_queue, names.SESSIONS_QUEUE)
        self._worker_until = 0.0

    async def start(self, state: SessionState, *, summary: str | None = None) -> None:
        """Start the session's driver. Idempotent."""
        await self._start(state, WorkflowIDReusePolicy.REJECT_DUPLICATE, summary)

    async def rebuild(self, session_id: str, rebuild: Rebuild, *, unattended: bool = False) -> None:
        """Start a driver that derives its state from the store; does nothing while one runs.

        Without `unattended`, raises `NoWorker` when no worker polls the task queue: this process may be configured with
        another task queue than the session's workers, and a driver there would never run.
        """
        if not (unattended or await self._has_worker()):
            raise NoWorker(f"No worker takes sessions from the task queue {self._queue}.")
        state = SessionState(session_id=session_id, agent="", token_hash="", rebuild=rebuild)
        await self._start(state, WorkflowIDReusePolicy.ALLOW_DUPLICATE, None)

    async def deliver(self, session_id: str, ref: JsonObject) -> None:
        await self._signal(session_id, names.DELIVER, ref)

    async def describe(self, session_id: str) -> DriverView | None:
        """Query the driver's state; None when it does not answer, because a query needs a worker."""
        handle = self._client.get_workflow_handle(session_id)
        query = handle.query(names.DESCRIBE, reject_condition=QueryRejectCondition.NOT_OPEN, rpc_timeout=RPC_PATIENCE)
        try:
            return read_view(await in_time(query))
        except WorkflowQueryRejectedError:
            raise NoDriver from None
        except (WorkflowQueryFailedError, TimeoutError):
            return None
        except ABSENT as error:
            # Without a worker the query times out or is rejected.
            if isinstance(error, RPCError) and error.status in _UNANSWERED:
                return None
            raise _translated(error) from error

    async def cancel(self, session_id: str, turn_id: str) -> None:
        await self._signal(session_id, names.CANCEL, {"turnId": turn_id})

    async def repair(self, session_id: str, how: Repair, reason: str = "OPERATOR") -> None:
        """Signal the running driver to retry, to derive its state from the store, or to end its session."""
        await self._signal(session_id, names.REPAIR, RepairOrder(how=how, reason=reason).model_dump(mode="json"))

    async def status(self, session_id: str) -> WorkflowExecutionStatus | None:
        """The status of the newest run of the session's workflow; None when Temporal knows no such workflow."""
        try:
            handle = self._client.get_workflow_handle(session_id)
            return (await _call(handle.describe(rpc_timeout=RPC_PATIENCE))).status
        except NoDriver:
            return None

    async def running(self) -> AsyncIterator[str]:
        """The ids of all sessions with a running driver. Temporal's list may be some seconds old."""
        query = (
            f"WorkflowType = '{names.SESSION_WORKFLOW}' AND TaskQueue = '{self._queue}' AND ExecutionStatus = 'Running'"
        )
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                async for each in self._client.list_workflows(query, page_size=1000):
                    yield each.id
        except ABSENT as error:
            raise _translated(error) from error

    async def terminate(self, session_id: str, reason: str) -> None:
        handle = self._client.get_workflow_handle(session_id)
        await _call(handle.terminate(reason=reason, rpc_timeout=RPC_PATIENCE))

    async def _start(self, state: SessionState, reuse: WorkflowIDReusePolicy, summary: str | None) -> None:
        starting = self._client.start_workflow(
            names.SESSION_WORKFLOW,
            state.model_dump(mode="json"),
            id=state.session_id,
            task_queue=self._queue,
            id_reuse_policy=reuse,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=summary,
            task_timeout=timedelta(seconds=names.DRIVER_DECISION_SECONDS),
            memo={"agent": state.agent, "model": state.model, "mode": state.mode},
            rpc_timeout=RPC_PATIENCE,
        )
        with contextlib.suppress(WorkflowAlreadyStartedError):
            await _call(starting)

    async def _signal(self, session_id: str, name: str, payload: JsonObject) -> None:
        handle = self._client.get_workflow_handle(session_id)
        await _call(handle.signal(name, payload, rpc_timeout=RPC_PATIENCE))

    async def _has_worker(self) -> bool:
        """Whether a worker has polled our task queue within the last minutes; True if we are not allowed to know."""
        if monotonic() < self._worker_until:
            return True
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=self._queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
        describing = self._client.workflow_service.describe_task_queue(request, timeout=RPC_PATIENCE)
        try:
            found = await in_time(describing)
        except ABSENT as error:
            if isinstance(error, RPCError) and error.status in NOT_FOR_US:
                return True
            raise _translated(error) from error
        if found.pollers:
            self._worker_until = monotonic() + _WORKER_SEEN
        return bool(found.pollers)


async def _call(call: Awaitable[T]) -> T:
    try:
        return await in_time(call)
    except ABSENT as error:
        raise _translated(error) from error


def read_view(state: Any) -> DriverView:
    try:
        return DriverView.model_validate(state)
    except ValidationError:
        return DriverView()


def _translated(error: RPCError | RuntimeError | OSError) -> PerdureError:
    if isinstance(error, RPCError) and not namespace_missing(error):
        if error.status == RPCStatusCode.NOT_FOUND:
            return NoDriver()
        if error.status not in _UNREACHABLE:
            # The error concerns this session only, for example a limit of its signals.
            return DriverRefused(f"Temporal does not take this: {error.status.name}.")
    return Unavailable("Temporal cannot be reached; try again.")
