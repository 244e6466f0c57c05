"""What the runtime asks of Temporal about drivers: start, signal, query, list and end them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest, DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import QueryRejectCondition, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import DriverRefused, NoDriver, NoWorker, PerdureError, Unavailable
from perdure.protocol import names
from perdure.protocol.requests import Failure
from perdure.protocol.runs import RunState
from perdure.protocol.wire import JsonObject
from perdure.runtime.connect import (
    ABSENT,
    NOT_FOR_US,
    RPC_PATIENCE,
    SearchAttributes,
    in_time,
    namespace_missing,
    search_attributes,
    typed,
)
from perdure.runtime.deploys import unserved
from perdure.session.state import Rebuild, Repair, RepairOrder, SessionState
from perdure.session.view import DriverView, read_view
from perdure.store.values import NewSession, SessionRow

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


_REPLACE = WorkflowIDConflictPolicy.TERMINATE_EXISTING


@dataclass(frozen=True)
class _Place:
    """Which workflow is started where."""

    workflow: str
    queue: str
    workflow_id: str
    memo: JsonObject


class DriverClient:
    """The drivers of all sessions. Raises `NoDriver` when there is none, `Unavailable` without Temporal."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self._client = client
        self._prefix = task_queue
        self._attributes = SearchAttributes()
        self._queue = names.queue(task_queue, names.SESSIONS_QUEUE)
        self._runs_queue = names.queue(task_queue, names.RUNS_QUEUE)
        self._worker_until = 0.0
        # The build of each driver, or None, by session, as Temporal listed them last.
        self._versions: dict[str, unserved.Version | None] = {}
        #: The sessions that wait for a worker of their build, which is gone. Empty without versioned workers.
        self.unserved: dict[str, str] = {}
        self.starts_wait = False  # Whether those that start now wait, too.

    async def start(self, state: SessionState, *, summary: str | None = None, lane_of: str | None = None) -> None:
        """Start the session's driver. Idempotent. `lane_of`: the session to which this lane belongs."""
        root = state.parent.root_session_id if state.parent else state.session_id
        attributes = search_attributes(state.agent, root, state.parent.session_id if state.parent else lane_of)
        await self._start(state, summary, WorkflowIDReusePolicy.REJECT_DUPLICATE, attributes)

    async def start_run(
        self, row: SessionRow | NewSession, *, ends: Failure | None = None, again: bool = False
    ) -> None:
        """Start the workflow of a run. Idempotent; with `again`, also when one has ended."""
        reuse = WorkflowIDReusePolicy.ALLOW_DUPLICATE if again else WorkflowIDReusePolicy.REJECT_DUPLICATE
        started = await self._start_run_at(row, ends, reuse, WorkflowIDConflictPolicy.FAIL)
        if not started and not _may_be(row.session_id, await self._type_of(row.session_id)):
            await self._replace_run(row, ends=ends)

    async def _replace_run(self, row: SessionRow | NewSession, *, ends: Failure | None) -> None:
        """Start the workflow of a run in place of what runs under its id."""
        await self._start_run_at(row, ends, WorkflowIDReusePolicy.ALLOW_DUPLICATE, _REPLACE)

    async def _start_run_at(
        self,
        row: SessionRow | NewSession,
        ends: Failure | None,
        reuse: WorkflowIDReusePolicy,
        conflict: WorkflowIDConflictPolicy,
    ) -> bool:
        state = RunState(run_id=row.session_id, ends=ends).model_dump(mode="json")
        place = _Place(names.RUN_WORKFLOW, self._runs_queue, row.session_id, {"run": row.agent})
        attributes = search_attributes(row.agent, row.session_id, None)
        return await self._start_at(place, state, row.agent, reuse, attributes, conflict)

    async def rebuild(
        self, session_id: str, rebuild: Rebuild, *, unattended: bool = False, of: SessionRow | None = None
    ) -> None:
        """Start a driver that derives its state from the store; does nothing while one runs.

        `of`: the session, so that Temporal's UI finds the driver by its agent and its family.

        Without `unattended`, raises `NoWorker` when no worker polls the task queue: this process may be configured with
        another task queue than the session's workers, and a driver there would never run.
        """
        if not (unattended or await self._has_worker()):
            raise NoWorker(f"No worker takes sessions from the task queue {self._queue}.")
        if of is not None and of.run is not None:
            await self.start_run(of, ends=rebuild.ends, again=True)
            return
        state = SessionState.to_rebuild(session_id, rebuild)
        await self._start(state, None, WorkflowIDReusePolicy.ALLOW_DUPLICATE, _attributes_of(of))

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

    async def cancel(self, session_id: str, turn_id: str, until: str | None = None) -> None:
        """`until`: of a turn that has not begun, when the newest delivery was accepted that may begin it."""
        meant = {} if until is None else {"until": until}
        await self._signal(session_id, names.CANCEL, {"turnId": turn_id, **meant})

    async def repair(self, session_id: str, how: Repair, reason: str = "OPERATOR") -> None:
        """Signal the running driver to retry, to derive its state from the store, or to end its session."""
        await self._signal(session_id, names.REPAIR, RepairOrder(how=how, reason=reason).model_dump(mode="json"))

    async def status(self, session_id: str) -> WorkflowExecutionStatus | None:
        """The status of the newest run of the session's workflow; None when Temporal knows no such workflow."""
        found = await self.execution(session_id)
        return found.status if found is not None and _may_be(session_id, found.workflow_type) else None

    async def execution(self, workflow_id: str) -> WorkflowExecutionDescription | None:
        """The newest run of a workflow, with what is under way in it; None when Temporal knows no such workflow."""
        try:
            return await _call(self._client.get_workflow_handle(workflow_id).describe(rpc_timeout=RPC_PATIENCE))
        except NoDriver:
            return None

    async def _type_of(self, session_id: str) -> str | None:
        found = await self.execution(session_id)
        return None if found is None else found.workflow_type

    async def running(self) -> AsyncIterator[str]:
        """The ids of all sessions with a running driver. Temporal's list may be some seconds old."""
        query = (
            f"WorkflowType IN ('{names.SESSION_WORKFLOW}', '{names.RUN_WORKFLOW}') "
            f"AND TaskQueue IN ('{self._queue}', '{self._runs_queue}') AND ExecutionStatus = 'Running'"
        )
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                versions: dict[str, unserved.Version | None] = {}
                async for each in self._client.list_workflows(query, page_size=1000):
                    if _may_be(each.id, each.workflow_type):
                        versions[each.id] = unserved.version_of(each)
                        yield each.id
                # Only now: `find_unserved` uses what the last complete list has left.
                self._versions = versions
        except ABSENT as error:
            raise _translated(error) from error

    async def find_unserved(self) -> None:
        """Find the sessions whose build has no worker, among the drivers that were listed last. Never raises."""
        if any(known := (self.unserved, self.starts_wait)) or self._versions:
            self.unserved, self.starts_wait = await unserved.find(self._client, self._prefix, self._versions, known)

    async def unreplayable(self) -> Mapping[str, unserved.Run] | None:
        """The sessions whose history cannot be replayed, each with the failing run; None if Temporal does not say."""
        return await unserved.find_unreplayable(self._client, self._prefix)

    async def replace(
        self, session_id: str, run: unserved.Run, rebuild: Rebuild, *, of: SessionRow | None = None
    ) -> bool:
        """Start a driver in place of one that cannot be replayed, or whose turn cannot; False if `run` has ended."""

        async def start(state: SessionState) -> None:
            if of is not None and of.run is not None:
                await self._replace_run(of, ends=state.rebuild.ends if state.rebuild else None)
                return
            attributes = _attributes_of(of)
            await self._start(state, None, WorkflowIDReusePolicy.ALLOW_DUPLICATE, attributes, replaces=True)

        return await _call(unserved.replace(self._client, session_id, run, rebuild, start))

    async def terminate(self, session_id: str, reason: str) -> None:
        handle = self._client.get_workflow_handle(session_id)
        await _call(handle.terminate(reason=reason, rpc_timeout=RPC_PATIENCE))

    async def delete(self, workflow_id: str, run_id: str = "") -> None:
        """Delete an execution, by default the newest one; it is ended first. Temporal does it some time later."""
        execution = WorkflowExecution(workflow_id=workflow_id, run_id=run_id)
        request = DeleteWorkflowExecutionRequest(namespace=self._client.namespace, workflow_execution=execution)
        with contextlib.suppress(NoDriver):
            await _call(self._client.workflow_service.delete_workflow_execution(request, timeout=RPC_PATIENCE))

    async def _start(
        self,
        state: SessionState,
        summary: str | None,
        reuse: WorkflowIDReusePolicy,
        attributes: Mapping[str, str],
        *,
        replaces: bool = False,
    ) -> None:
        memo = {"agent": state.agent, "model": state.model, "mode": state.mode}
        place = _Place(names.SESSION_WORKFLOW, self._queue, state.session_id, memo)
        conflict = _REPLACE if replaces else WorkflowIDConflictPolicy.USE_EXISTING
        await self._start_at(place, state.model_dump(mode="json"), summary, reuse, attributes, conflict)

    async def _start_at(
        self,
        place: _Place,
        state: JsonObject,
        summary: str | None,
        reuse: WorkflowIDReusePolicy,
        attributes: Mapping[str, str],
        conflict: WorkflowIDConflictPolicy,
    ) -> bool:
        """False if there is one of this id, and it stays."""

        async def start(attributes: Mapping[str, str]) -> None:
            await self._client.start_workflow(
                place.workflow,
                state,
                id=place.workflow_id,
                task_queue=place.queue,
                id_reuse_policy=reuse,
                id_conflict_policy=conflict,
                static_summary=summary,
                task_timeout=timedelta(seconds=names.DRIVER_DECISION_SECONDS),
                memo=place.memo,
                search_attributes=typed(attributes),
                rpc_timeout=RPC_PATIENCE,
            )

        async def start_anyway() -> None:
            while True:
                known = self._attributes.known(attributes)
                try:
                    return await start(known)
                except RPCError as error:
                    # Each time it does without at least one more.
                    if not known or not self._attributes.unknown(known, error):
                        raise

        try:
            await _call(start_anyway())
        except WorkflowAlreadyStartedError:
            return False
        return True

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


def _attributes_of(row: SessionRow | None) -> Mapping[str, str]:
    if row is None:
        return {}
    return search_attributes(row.agent, row.root_id or row.session_id, row.parent_id or row.lane_of)


def _may_be(workflow_id: str, workflow_type: str | None) -> bool:
    """Whether this workflow may have this id: a build that knows no runs starts drivers for those that it finds."""
    return workflow_type != names.SESSION_WORKFLOW or not workflow_id.startswith(names.RUN_ID)


async def _call(call: Awaitable[T]) -> T:
    try:
        return await in_time(call)
    except ABSENT as error:
        raise _translated(error) from error


def _translated(error: RPCError | RuntimeError | OSError) -> PerdureError:
    if isinstance(error, RPCError) and not namespace_missing(error):
        if error.status == RPCStatusCode.NOT_FOUND:
            return NoDriver()
        if error.status not in _UNREACHABLE:
            # The error concerns this session only, for example a limit of its signals.
            return DriverRefused(f"Temporal does not take this: {error.status.name}.")
    return Unavailable("Temporal cannot be reached; try again.")
