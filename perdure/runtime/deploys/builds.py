"""The builds of a versioned deployment, as Temporal sees them: routing, workers, open sessions, running turns.

Sessions and turns are two deployments at Temporal. Here they are one: a build serves both.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.api.deployment.v1 import WorkerDeploymentInfo, WorkerDeploymentVersion
from temporalio.api.enums.v1 import RoutingConfigUpdateState, TaskQueueType, WorkerDeploymentVersionStatus, WorkerStatus
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeTaskQueueResponse,
    DescribeWorkerDeploymentRequest,
    DescribeWorkerDeploymentVersionRequest,
    ListWorkersRequest,
    UpdateWorkerDeploymentVersionMetadataRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import Misconfigured, Unavailable
from perdure.protocol import names
from perdure.protocol.wire import Wire
from perdure.runtime.connect import ABSENT, RPC_PATIENCE, in_time, namespace_missing
from perdure.session import state
from perdure.settings import Settings

log = logging.getLogger("perdure.deploys")

T = TypeVar("T")

#: A deployment and one of its builds.
Version: TypeAlias = tuple[str, str]

#: The two deployments of each build. Newer turns work for older drivers, so the turns go first.
KINDS = (names.TURNS_QUEUE, names.SESSIONS_QUEUE)
_WORKFLOWS = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
_ACTIVITIES = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
#: The task queues of each deployment.
QUEUES = {
    names.TURNS_QUEUE: (
        (names.TURNS_QUEUE, _WORKFLOWS),
        (names.MODELS_QUEUE, _ACTIVITIES),
        (names.TOOLS_QUEUE, _ACTIVITIES),
    ),
    names.SESSIONS_QUEUE: ((names.SESSIONS_QUEUE, _WORKFLOWS),),
}

#: A poll lasts a minute. A worker that began its last one earlier than this is gone.
_POLL_SECONDS = 75.0

#: The key of a build's facts in the metadata of its versions at Temporal.
_FACTS = "perdure"
#: How often a worker tries to write them, over some minutes.
_ANNOUNCEMENTS = 12

_COMPLETED = RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_COMPLETED
_IN_PROGRESS = RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_IN_PROGRESS
_STATUS = {
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_CURRENT: "current",
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_RAMPING: "ramping",
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_DRAINING: "draining",
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_DRAINED: "drained",
}


class Facts(Wire):
    """What a build reads and serves, as its workers say. A build that says nothing has the defaults."""

    session_state: int = 0
    turn_snapshot: int = 0
    agents: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.session_state > 0

    def newer_than(self, other: Facts) -> Sequence[str]:
        """What this build writes and the other one cannot read, in words."""
        if not (self.is_known and other.is_known):
            return ()
        pairs = (
            ("session state", self.session_state, other.session_state),
            ("turn snapshots", self.turn_snapshot, other.turn_snapshot),
        )
        return [f"{what} of version {mine} (it reads {theirs})" for what, mine, theirs in pairs if mine > theirs]


@dataclass(frozen=True)
class Routing:
    """Where Temporal starts new work of one deployment."""

    current: str = ""
    ramping: str = ""
    percent: float = 0.0
    # Whether all task queues know it.
    settled: bool = True
    # The status of each build that the server knows, and the latest first.
    builds: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Build:
    """One build: the status of its two versions, and what runs on it."""

    build_id: str
    sessions: str
    turns: str
    workers: int
    open_sessions: int
    running_turns: int


class Builds:
    """The builds of one deployment. Everything is read from Temporal at each call."""

    def __init__(self, client: Client, deployment: str, task_queue: str) -> None:
        self.client = client
        self.deployment = deployment
        self._task_queue = task_queue

    async def routing(self, kind: str) -> Routing:
        """The routing of one of the two deployments; an empty one while the server knows no worker of it."""
        request = DescribeWorkerDeploymentRequest(namespace=self.client.namespace, deployment_name=self.name(kind))
        answer = await found(self.client.workflow_service.describe_worker_deployment(request, timeout=RPC_PATIENCE))
        return Routing() if answer is None else _routing(answer.worker_deployment_info)

    async def known_queues(self, kind: str, build: str) -> frozenset[str]:
        """The task queues that the server knows of the build."""
        answer = await self._version(kind, build)
        return frozenset() if answer is None else frozenset(each.name for each in answer.version_task_queues)

    async def facts(self, build: str) -> Facts:
        answer = await self._version(names.SESSIONS_QUEUE, build)
        if answer is None:
            return Facts()
        entries = answer.worker_deployment_version_info.metadata.entries
        try:
            return Facts.model_validate_json(entries[_FACTS].data) if _FACTS in entries else Facts()
        except ValidationError:
            return Facts()

    async def workers(self, kind: str) -> dict[str, int]:
        """How many workers of each build poll all the queues of this kind."""
        polling = [await self.polling(queue, type) for queue, type in QUEUES[kind]]
        builds = {build for each in polling for build in each}
        return {build: min(len(each.get(build, ())) for each in polling) for build in builds}

    async def queues_know(self, kind: str, routing: Routing) -> bool:
        """Whether each queue of this kind has the routing: the server may say for ever that it still tells them."""
        for queue, type in QUEUES[kind]:
            its = (await self._described(queue, type)).versioning_info
            found = (its.current_deployment_version.build_id, its.ramping_deployment_version.build_id)
            if found != (routing.current, routing.ramping) or its.ramping_version_percentage != routing.percent:
                return False
        return True

    async def polling(self, queue: str, type: TaskQueueType.ValueType = _WORKFLOWS) -> dict[str, set[str]]:
        """The workers that poll a queue, by build: those of this deployment, and not those that have stopped."""
        name = self.queue(queue)
        described = await self._described(queue, type)
        stopped = await self._stopped(name)
        oldest = time.time() - _POLL_SECONDS
        deployment = self.name(names.SESSIONS_QUEUE if queue == names.SESSIONS_QUEUE else names.TURNS_QUEUE)
        polling: dict[str, set[str]] = {}
        for poller in described.pollers:
            build = poller.deployment_options.build_id
            is_ours = poller.deployment_options.deployment_name == deployment
            seen = poller.last_access_time.ToNanoseconds() / 1e9
            if is_ours and seen > max(oldest, stopped.get((poller.identity, build), 0.0)):
                polling.setdefault(build, set()).add(poller.identity)
        return polling

    async def _described(self, queue: str, type: TaskQueueType.ValueType) -> DescribeTaskQueueResponse:
        return await described_queue(self.client, self.queue(queue), type)

    async def status(self) -> Sequence[Build]:
        """All builds that have a worker or work, the newest first."""
        routing = {kind: await self.routing(kind) for kind in KINDS}
        sessions, turns = routing[names.SESSIONS_QUEUE].builds, routing[names.TURNS_QUEUE].builds
        workers = {kind: await self.workers(kind) for kind in KINDS}
        return [
            Build(
                build_id=build,
                sessions=sessions.get(build, "absent"),
                turns=turns.get(build, "absent"),
                workers=min(workers[kind].get(build, 0) for kind in KINDS),
                open_sessions=await self._count(names.SESSIONS_QUEUE, build),
                running_turns=await self._count(names.TURNS_QUEUE, build),
            )
            for build in dict.fromkeys((*turns, *sessions))
        ]

    async def count_problems(self) -> int:
        """How many workflows of this task queue fail again and again, as Temporal marks them."""
        try:
            return (await called(self.client.count_workflows(problems(self._task_queue, "IS NOT NULL")))).count
        except Unavailable:
            # Older servers do not know the attribute.
            return 0

    def query(self, kind: str, build: str) -> str:
        """The query for the workflows of a kind that run on a build."""
        # Runs move as sessions do.
        drivers = (names.SESSION_WORKFLOW, names.RUN_WORKFLOW)
        workflows = drivers if kind == names.SESSIONS_QUEUE else (names.TURN_WORKFLOW,)
        version = literal(f"{self.name(kind)}:{build}")
        return (
            f"WorkflowType IN ({', '.join(map(literal, workflows))}) AND ExecutionStatus = 'Running' "
            f"AND TemporalWorkerDeploymentVersion = {version}"
        )

    def name(self, kind: str) -> str:
        """The name of one of the two deployments at Temporal."""
        return f"{self.deployment}-{kind}"

    def queue(self, queue: str) -> str:
        return names.queue(self._task_queue, queue)

    def version(self, kind: str, build: str) -> WorkerDeploymentVersion:
        return WorkerDeploymentVersion(deployment_name=self.name(kind), build_id=build)

    async def _version(self, kind: str, build: str) -> Any:
        request = DescribeWorkerDeploymentVersionRequest(
            namespace=self.client.namespace, deployment_version=self.version(kind, build)
        )
        service = self.client.workflow_service
        return await found(service.describe_worker_deployment_version(request, timeout=RPC_PATIENCE))

    async def _count(self, kind: str, build: str) -> int:
        return (await called(self.client.count_workflows(self.query(kind, build)))).count

    async def _stopped(self, queue: str) -> dict[tuple[str, str], float]:
        """When workers told the server that they stop, by identity and build. The server lists their polls longer."""
        request = ListWorkersRequest(
            namespace=self.client.namespace, page_size=1000, query=f"TaskQueue = {literal(queue)}"
        )
        try:
            answer = await called(self.client.workflow_service.list_workers(request, timeout=RPC_PATIENCE))
        except Unavailable:
            # Older servers do not know this call. Their pollers disappear after a minute.
            return {}
        stopped: dict[tuple[str, str], float] = {}
        for each in answer.workers_info:
            beat = each.worker_heartbeat
            if beat.status != WorkerStatus.WORKER_STATUS_RUNNING:
                which = (beat.worker_identity, beat.deployment_version.build_id)
                stopped[which] = max(stopped.get(which, 0.0), beat.heartbeat_time.ToNanoseconds() / 1e9)
        return stopped


def _routing(info: WorkerDeploymentInfo) -> Routing:
    config = info.routing_config
    newest = sorted(info.version_summaries, key=lambda each: each.create_time.ToNanoseconds(), reverse=True)
    return Routing(
        current=config.current_deployment_version.build_id,
        ramping=config.ramping_deployment_version.build_id,
        percent=config.ramping_version_percentage,
        settled=info.routing_config_update_state in (_COMPLETED, 0),
        builds={each.deployment_version.build_id: _STATUS.get(each.status, "inactive") for each in newest},
    )


def problems(task_queue: str, condition: str) -> str:
    """The query for the open workflows whose problems, as Temporal reports them, meet the condition."""
    queues = ", ".join(literal(names.queue(task_queue, kind)) for kind in (*KINDS, names.RUNS_QUEUE))
    return f"TaskQueue IN ({queues}) AND ExecutionStatus = 'Running' AND TemporalReportedProblems {condition}"


def literal(text: str) -> str:
    """The text inside of a query."""
    return "'" + text.replace("'", "''") + "'"


async def called(call: Awaitable[T], patience: timedelta = RPC_PATIENCE) -> T:
    """Await a call to Temporal; `Unavailable` with its reason when it fails."""
    try:
        return await in_time(call, patience)
    except TimeoutError as late:
        raise Unavailable(str(late)) from None
    except ABSENT as error:
        if isinstance(error, RPCError):
            raise Unavailable(f"Temporal refuses this ({error.status.name}): {error.message}") from error
        raise Unavailable("Temporal cannot be reached; try again.") from error


async def found(call: Awaitable[T]) -> T | None:
    """As above; None for what the server does not know."""
    try:
        return await called(call)
    except Unavailable as error:
        cause = error.__cause__
        if isinstance(cause, RPCError) and cause.status == RPCStatusCode.NOT_FOUND and not namespace_missing(cause):
            return None
        raise


async def described_queue(
    client: Client, queue: str, type: TaskQueueType.ValueType, *, stats: bool = False
) -> DescribeTaskQueueResponse:
    """What Temporal says of a task queue. `stats`: also of how much waits in it."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=type, report_stats=stats
    )
    return await called(client.workflow_service.describe_task_queue(request, timeout=RPC_PATIENCE))


def pollers_of(described: DescribeTaskQueueResponse) -> Mapping[str, float]:
    """The workers that poll a queue, and when each was heard of last, in seconds since the epoch."""
    seen = {each.identity: each.last_access_time.ToNanoseconds() / 1e9 for each in described.pollers}
    oldest = time.time() - _POLL_SECONDS
    return {identity: at for identity, at in seen.items() if at > oldest}


async def current_version(client: Client, queue: str) -> Version | None:
    """The version that starts new workflows of this task queue, if it is one of versioned workers."""
    described = await described_queue(client, queue, _WORKFLOWS)
    current = described.versioning_info.current_deployment_version
    return (current.deployment_name, current.build_id) if current.build_id else None


async def warn_unversioned(client: Client, settings: Settings) -> None:
    """Log if workers without a build, such as this one, get no work, because a build was promoted. Never raises."""
    for kind in KINDS:
        queue = names.queue(settings.task_queue, kind)
        try:
            current = await current_version(client, queue)
        except Unavailable:
            log.debug("the versions of %s could not be looked up", queue, exc_info=True)
            return
        if current is not None:
            log.warning(
                "this worker gets no work from %s: build %s is the current one of deployment %s, and this worker has "
                "no build. Start workers with PERDURE_DEPLOYMENT=%s and a PERDURE_BUILD_ID",
                *(queue, current[1], current[0], current[0].removesuffix(f"-{kind}")),
            )
            return


async def warn_of_pools(client: Client, task_queue: str, pools: Sequence[str], pause: float = 30.0) -> None:
    """Log when a pool has no worker, and when it has one again. Calls of its tools wait at Temporal. Never ends."""
    unserved: set[str] = set()
    while pools:
        # A worker that starts together with this one has polled by then.
        await asyncio.sleep(pause)
        for pool in pools:
            try:
                served = await is_pool_served(client, task_queue, pool)
            except Unavailable:
                log.debug("the workers of pool %s could not be looked up", pool, exc_info=True)
                continue
            if served and pool in unserved:
                unserved.discard(pool)
                log.info("the pool %s is served again", pool)
            elif not served and pool not in unserved:
                unserved.add(pool)
                log.error(
                    "no worker serves the pool %s, and its tools wait: start `perdure worker --pool %s`", pool, pool
                )


async def is_pool_served(client: Client, task_queue: str, pool: str) -> bool:
    """Whether a worker polls for calls of this pool."""
    queue = names.queue(task_queue, names.tools_queue(pool))
    return bool(pollers_of(await described_queue(client, queue, _ACTIVITIES)))


def builds_of(client: Client, settings: Settings) -> Builds:
    """The builds of the deployment that the settings name."""
    if settings.deployment is None:
        raise Misconfigured(
            "PERDURE_DEPLOYMENT names the deployment; it is not set. Workers without it have no versions to switch."
        )
    return Builds(client, settings.deployment, settings.task_queue)


async def announce(client: Client, settings: Settings, agents: Sequence[str]) -> None:
    """Tell the server what this worker's build reads and serves. Ends once it has succeeded.

    Only `perdure deploy` reads it, to warn before a switch; so no failure here may stop a worker.
    """
    facts = Facts(session_state=state.SESSION.version, turn_snapshot=state.SNAPSHOT.version, agents=tuple(agents))
    payload = Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(facts.model_dump(mode="json")).encode())
    version = WorkerDeploymentVersion(
        deployment_name=f"{settings.deployment}-{names.SESSIONS_QUEUE}", build_id=settings.build_id or ""
    )
    request = UpdateWorkerDeploymentVersionMetadataRequest(
        namespace=client.namespace, deployment_version=version, upsert_entries={_FACTS: payload}
    )
    for attempt in range(_ANNOUNCEMENTS):
        # The server learns of a build with its first poll.
        await asyncio.sleep(min(60.0, 0.2 * 2**attempt))
        try:
            service = client.workflow_service
            await in_time(service.update_worker_deployment_version_metadata(request, timeout=RPC_PATIENCE))
            return
        except ABSENT as error:
            log.debug("the build's facts could not be written", exc_info=error)
