"""Signals to the workflows that drive sessions. The sweeper repeats signals that failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest, DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError, WorkflowQueryRejectedError
from temporalio.common import (
    QueryRejectCondition,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.agents.agent import DEMO, Limits
from perdure.agents.registry import AgentRegistry
from perdure.bounds import quoted
from perdure.errors import (
    AgentNotFound,
    BuildGone,
    DriverRefused,
    NoDriver,
    NoWorker,
    PerdureError,
    StoreBehind,
    Unavailable,
)
from perdure.protocol import names
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.session.state import (
    OPERATOR_CANCELLED,
    OPERATOR_TERMINATED,
    DriverView,
    Rebuild,
    Repair,
    RepairOrder,
    SessionState,
    parent_ref,
    read_delivery,
    read_view,
)
from perdure.store.base import Store
from perdure.store.values import CancelRequest, DeliveryRow, NewSession, SessionRow
from perdure.telemetry import spans

from .connect import ABSENT, NOT_FOR_US, RPC_PATIENCE, SearchAttributes, in_time, namespace_missing
from .deliveries import reference
from .deploys import unserved

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


class DriverClient:
    """The drivers of all sessions. Raises `NoDriver` when there is none, `Unavailable` without Temporal."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self._client = client
        self._prefix = task_queue
        self._attributes = SearchAttributes()
        self._queue = names.queue(task_queue, names.SESSIONS_QUEUE)
        self._worker_until = 0.0
        # The build of each driver, or None, by session, as Temporal listed them last.
        self._versions: dict[str, unserved.Version | None] = {}
        #: The sessions that wait for a worker of their build, which is gone. Empty without versioned workers.
        self.unserved: dict[str, str] = {}
        self.starts_wait = False  # Whether those that start now wait, too.

    async def start(self, state: SessionState, *, summary: str | None = None) -> None:
        """Start the session's driver. Idempotent."""
        root = state.parent.root_session_id if state.parent else state.session_id
        await self._start(
            state, summary, WorkflowIDReusePolicy.REJECT_DUPLICATE, self._attributes.of(state.agent, root)
        )

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
        state = SessionState.to_rebuild(session_id, rebuild)
        await self._start(state, None, WorkflowIDReusePolicy.ALLOW_DUPLICATE, self._attributes_of(of))

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
                versions: dict[str, unserved.Version | None] = {}
                async for each in self._client.list_workflows(query, page_size=1000):
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
            attributes = self._attributes_of(of)
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

    def _attributes_of(self, row: SessionRow | None) -> TypedSearchAttributes | None:
        return None if row is None else self._attributes.of(row.agent, row.root_id or row.session_id)

    async def _start(
        self,
        state: SessionState,
        summary: str | None,
        reuse: WorkflowIDReusePolicy,
        attributes: TypedSearchAttributes | None,
        *,
        replaces: bool = False,
    ) -> None:
        conflict = WorkflowIDConflictPolicy.TERMINATE_EXISTING if replaces else WorkflowIDConflictPolicy.USE_EXISTING

        async def start(attributes: TypedSearchAttributes | None) -> None:
            await self._client.start_workflow(
                names.SESSION_WORKFLOW,
                state.model_dump(mode="json"),
                id=state.session_id,
                task_queue=self._queue,
                id_reuse_policy=reuse,
                id_conflict_policy=conflict,
                static_summary=summary,
                task_timeout=timedelta(seconds=names.DRIVER_DECISION_SECONDS),
                memo={"agent": state.agent, "model": state.model, "mode": state.mode},
                search_attributes=attributes,
                rpc_timeout=RPC_PATIENCE,
            )

        async def start_anyway() -> None:
            try:
                await start(attributes)
            except RPCError as error:
                if attributes is None or not self._attributes.unknown(error):
                    raise
                await start(None)

        with contextlib.suppress(WorkflowAlreadyStartedError):
            await _call(start_anyway())

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


def _translated(error: RPCError | RuntimeError | OSError) -> PerdureError:
    if isinstance(error, RPCError) and not namespace_missing(error):
        if error.status == RPCStatusCode.NOT_FOUND:
            return NoDriver()
        if error.status not in _UNREACHABLE:
            # The error concerns this session only, for example a limit of its signals.
            return DriverRefused(f"Temporal does not take this: {error.status.name}.")
    return Unavailable("Temporal cannot be reached; try again.")


log = logging.getLogger("perdure.sessions")

#: A signal without an answer after so many seconds may be overtaken by the next one.
_SLOW_SECONDS = 0.5


class Signals:
    """Signals drivers. Repeating a signal is safe: a driver ignores a delivery that it knows."""

    def __init__(
        self, store: Store, driver: DriverClient, agents: AgentRegistry | None = None, *, ui_detail: bool = True
    ) -> None:
        self._store = store
        self._driver = driver
        self._agents = agents
        self._ui_detail = ui_detail
        # When the signals began, by session, that Temporal has not answered yet.
        self._in_flight: dict[str, list[float]] = {}

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool:
        """Signal one delivery to the driver; False when it has to be signalled later, or no worker can read it now.

        `unsignalled`: the driver may not have received earlier deliveries. To keep the order, all waiting deliveries
        are signalled then, and also while an earlier signal has no answer for some time.
        """
        if unsignalled or row.ref is None or self._is_slow(row.session_id):
            sent = await self._send_all_in_time(row.session_id)
        else:
            sent = await self._send(row.session_id, self._driver.deliver(row.session_id, reference(row)))
        return sent and row.session_id not in self._driver.unserved

    def limits(self, agent: str) -> Limits:
        """What the agent declares, if this process knows it."""
        known = self._agents.get(agent) if self._agents else None
        return known.limits if known else Limits()

    def known_limits(self, agent: str) -> Limits:
        """The same; `AgentNotFound` if this process has agents, and this is none of them."""
        if self._agents is not None and agent not in self._agents:
            raise AgentNotFound(f"No agent named {quoted(agent)!r} is known here.", agent=agent)
        return self.limits(agent)

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        """Start the driver of a new session; False when it is started, or taken up, later."""
        state = self._first_state(session, session.token_hash, [ref])
        return await self._send(session.session_id, self._start(state, session.title)) and not self._driver.starts_wait

    async def start_with_turns(self, row: SessionRow) -> bool:
        """Start the driver of a new fork or import, which has turns already; False when it has to be started later."""
        return await self._send(row.session_id, self._start(await self._state_with_turns(row), row.title))

    async def cancel(self, request: CancelRequest) -> bool:
        """Signal a cancel request, which the store has already; False when it has to be signalled later."""
        turn_id = names.turn_id(request.turn)
        sent = await self._send(request.session_id, self._driver.cancel(request.session_id, turn_id))
        return sent and request.session_id not in self._driver.unserved

    async def describe(self, session_id: str) -> DriverView | None:
        """Query the session's driver and compare it with the store; None when the driver does not answer.

        When the store or Temporal was restored from a backup, one of them is older. A driver that takes unread
        deliveries for done would then be signalled again and again.
        """
        before = await self._store.session(session_id)
        view = await self._driver.describe(session_id)
        if before is None or view is None:
            return view
        now = await self._store.session(session_id)
        if now is None or now.ended:
            return view
        if view.head is not None and now.events < view.head:
            message = f"The store has {now.events} events of this session, which has had {view.head}."
            await set_attention(self._store, session_id, Attention(code=StoreBehind.code, message=message))
        elif view.is_behind(before.turns) or await self._is_dropped(session_id, view):
            log.warning("the driver of session %s is older than the store; it reads the store again", session_id)
            await self._driver.repair(session_id, "rebuild", "DRIVER_BEHIND")
        return view

    async def _is_dropped(self, session_id: str, view: DriverView) -> bool:
        """Whether the driver takes a delivery for done that no turn has read."""
        dropped = view.dropped
        return bool(dropped) and any(each.delivery_id in dropped for each in await self._store.unread(session_id))

    @property
    def unserved(self) -> Mapping[str, str]:
        """The sessions that wait for a worker of their build, with this build."""
        return self._driver.unserved

    async def find_unserved(self) -> None:
        await self._driver.find_unserved()

    async def attend_unserved(self, session_id: str) -> None:
        """Emit that a session with an unread delivery waits for a worker of its build."""
        build = self._driver.unserved[session_id]
        await set_attention(self._store, session_id, Attention(code=BuildGone.code, message=BuildGone.of(build)))

    async def signal_all(self, session_id: str, signalled: set[str] | None = None) -> None:
        """Signal everything that the session's driver may not know, in order; start a driver if there is none.

        `signalled`: the ids of deliveries to skip. The ids of those that are signalled now are added.
        """
        row = await self._store.session(session_id)
        if row is None:
            return
        if not row.ended:
            try:
                await self._send_all(row, set() if signalled is None else signalled)
            except NoDriver:
                await start_lost_driver(self._store, self._driver, row)
        if row.unsignalled:
            # After the signals, so that later deliveries cannot overtake them. A mark added meanwhile stays.
            await self._store.clear_unsignalled(session_id, row.unsignalled)

    async def deliver_all(self, session_id: str) -> bool:
        """Signal everything that the session's driver may not know; False when it has to be signalled later."""
        return await self._send_all_in_time(session_id)

    async def _send(self, session_id: str, sending: Awaitable[None]) -> bool:
        began = monotonic()
        in_flight = self._in_flight.setdefault(session_id, [])
        in_flight.append(began)
        try:
            await sending
        except NoDriver:
            return await self._send_all_in_time(session_id)
        except Exception as error:
            await self._mark(session_id, error)
            return False
        finally:
            in_flight.remove(began)
            if not in_flight:
                self._in_flight.pop(session_id, None)
        return True

    def _is_slow(self, session_id: str) -> bool:
        in_flight = self._in_flight.get(session_id)
        return bool(in_flight) and monotonic() - in_flight[0] > _SLOW_SECONDS

    async def _send_all_in_time(self, session_id: str) -> bool:
        try:
            # The time limit is that of one call, however many signals there are.
            await in_time(self.signal_all(session_id))
        except Exception as error:
            await self._mark(session_id, error)
            return False
        return True

    async def _mark(self, session_id: str, error: Exception) -> None:
        """Mark the session as not fully signalled. It never raises: the delivery stays accepted."""
        fault = None if isinstance(error, Unavailable | TimeoutError) else error
        log.warning("deliveries to session %s are signalled later", session_id, exc_info=fault)
        try:
            await self._store.mark_unsignalled(session_id)
        except Exception:
            # The sweeper finds the deliveries also without the mark; only their order may differ then.
            log.warning("session %s could not be marked", session_id, exc_info=True)

    async def _send_all(self, row: SessionRow, signalled: set[str]) -> None:
        token_hash = await self._store.token_of(row.session_id) or ""
        waiting = await self._store.unread(row.session_id)
        if row.status == "starting":
            refs = [reference(each, token_hash) for each in waiting]
            await self._start(self._first_state(row, token_hash, refs), row.title)
        elif row.is_new_fork:
            # Nothing happens if its driver runs.
            await self._start(await self._state_with_turns(row), row.title)
        for each in waiting:
            if each.delivery_id not in signalled:
                await self._driver.deliver(row.session_id, reference(each, token_hash))
                signalled.add(each.delivery_id)
        if row.cancel_turn is not None:
            await self._driver.cancel(row.session_id, names.turn_id(row.cancel_turn))

    def _first_state(
        self, session: NewSession | SessionRow, token_hash: str, waiting: Sequence[JsonObject]
    ) -> SessionState:
        agent = self._agents.get(session.agent) if self._agents else None
        state = SessionState(
            session_id=session.session_id,
            agent=session.agent,
            # The Temporal UI shows it until the first model call.
            model=(agent.model or DEMO) if agent else None,
            mode=session.mode,
            capabilities=session.capabilities,
            token_hash=token_hash,
            bounds=session.bounds,
            turns=agent.turns if agent else None,
            parent=parent_ref(session.parent),
            calls_back=isinstance(session, NewSession) and session.callback is not None,
        )
        for ref in waiting:
            # A delivery of a newer build may be unreadable here. It is signalled as well, to a driver that can read it.
            if (delivery := read_delivery(ref)) is not None:
                state = state.with_delivery(delivery)
        return state

    async def _state_with_turns(self, row: SessionRow) -> SessionState:
        """The state that a rebuild would find: all turns so far are shared ones, and nothing waits."""
        state = self._first_state(row, await self._store.token_of(row.session_id) or "", [])
        return state.model_copy(update={"turn": row.turns, "told": row.turns, "head": row.events})

    async def _start(self, state: SessionState, title: str | None) -> None:
        summary = f"{state.agent}: {title}" if self._ui_detail and title else state.agent
        await self._driver.start(state, summary=summary)
        await end_if_deleted(self._store, self._driver, state.session_id)


async def start_lost_driver(store: Store, driver: DriverClient, row: SessionRow, *, unattended: bool = False) -> str:
    """Repair a session that is open in the store but has no running workflow. The result says what was found.

    `unattended`: start a workflow also when no worker would run it; else that raises `NoWorker`.
    """
    session_id = row.session_id
    status = await driver.status(session_id)
    behind = row.attention is not None and row.attention["code"] == StoreBehind.code
    if status is None and behind:
        # Its workflow had ended, and Temporal has deleted it since. An operator still has to decide.
        return "the store is older than the session; an operator has to decide"
    match status:
        case WorkflowExecutionStatus.RUNNING | WorkflowExecutionStatus.CONTINUED_AS_NEW:
            return "its workflow runs"
        case WorkflowExecutionStatus.COMPLETED:
            # A workflow ends only after the store has recorded it, so this store was restored from an older backup.
            message = "The session's workflow has ended, and this store does not know of it."
            await set_attention(store, session_id, Attention(code=StoreBehind.code, message=message))
            return "the store is older than the session; an operator has to decide"
        case WorkflowExecutionStatus.TERMINATED:
            rebuild = Rebuild(reason="WORKFLOW_TERMINATED", ends=OPERATOR_TERMINATED)
        case WorkflowExecutionStatus.CANCELED:
            rebuild = Rebuild(reason="WORKFLOW_CANCELLED", ends=OPERATOR_CANCELLED)
        case None if row.is_new_fork:
            # Temporal was not reachable when the session was forked.
            rebuild = Rebuild(reason="FORKED")
        case None:
            rebuild = Rebuild(reason="WORKFLOW_LOST")
        case _:
            rebuild = Rebuild(reason="WORKFLOW_FAILED")
    await driver.rebuild(session_id, rebuild, unattended=unattended, of=row)
    if await end_if_deleted(store, driver, session_id):
        return "it was deleted meanwhile"
    then = "it is ended" if rebuild.ends else "it is started from the store"
    log.warning("session %s had no workflow (%s); %s", session_id, rebuild.reason, then)
    return f"it had no workflow ({rebuild.reason}); {then}"


async def end_if_deleted(store: Store, driver: DriverClient, session_id: str) -> bool:
    """Delete the session's workflow if the session was deleted before the workflow was started.

    While the session has a row, its deletion is still to look for workflows.
    """
    if await store.deletion(session_id) is None or await store.session(session_id) is not None:
        return False
    await driver.delete(session_id)
    return True


async def set_attention(store: Store, session_id: str, attention: Attention) -> None:
    """Mark the session as in need of attention, in the store, the log and the metrics."""
    if await store.set_attention(session_id, attention):
        log.warning("session %s needs attention: %s", session_id, attention.code)
        spans.needs_attention(attention.code)
