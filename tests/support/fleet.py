"""Builds of a versioned deployment, as an operator switches them."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from subprocess import CompletedProcess

import pytest
from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.enums.v1 import RoutingConfigUpdateState
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    DescribeWorkerDeploymentVersionRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

import worker as composition
from perdure.protocol import names
from perdure.runtime.connect import temporal_client
from perdure.runtime.deploys import builds as of_builds
from perdure.runtime.deploys.builds import Builds
from perdure.settings import Settings
from tests.support import commands
from tests.support.processes import clean_environment
from tests.support.workflows import Bench, Outside
from workflows.run import RunWorkflow
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

#: Each is a deployment of its own. Newer turns work for older drivers, so they go first.
KINDS = (names.TURNS_QUEUE, names.SESSIONS_QUEUE)

#: Each question costs the server as much as a turn does, and some are asked for ten seconds.
_PAUSE = 0.1

#: How many task queues the workers of each deployment poll.
_QUEUES = {names.TURNS_QUEUE: 4, names.SESSIONS_QUEUE: 2}


async def make_current(client: Client, deployment: str, build: str, kinds: Sequence[str] = KINDS) -> None:
    """Make the build the current one of these deployments, and wait until all of its queues know."""
    for kind in kinds:
        async with asyncio.timeout(60):
            await _polled(client, f"{deployment}-{kind}", build, _QUEUES[kind])
            await _set_current(client, f"{deployment}-{kind}", build)
            # The server may report a switch as in progress for ever; all queues follow within seconds all the same.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await _known_everywhere(client, f"{deployment}-{kind}")


async def _polled(client: Client, deployment: str, build: str, queues: int) -> None:
    """Wait until the server knows all queues of the build.

    If it learns of one while it makes the build current, it may never report that all queues know.
    """
    version = WorkerDeploymentVersion(deployment_name=deployment, build_id=build)
    request = DescribeWorkerDeploymentVersionRequest(namespace=client.namespace, deployment_version=version)
    while True:
        # The server learns of a build, and of each of its queues, with the first poll.
        with contextlib.suppress(RPCError):
            found = await client.workflow_service.describe_worker_deployment_version(request)
            if len(found.version_task_queues) >= queues:
                return
        await asyncio.sleep(_PAUSE)


async def build_of(client: Client, workflow_id: str) -> str:
    """The build that a workflow is pinned to; empty when its worker has no version."""
    description = await client.get_workflow_handle(workflow_id).describe()
    return description.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


async def _set_current(client: Client, deployment: str, build: str) -> None:
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace, deployment_name=deployment, build_id=build, identity="tests"
    )
    while True:
        with contextlib.suppress(RPCError):
            await client.workflow_service.set_worker_deployment_current_version(request)
            return
        await asyncio.sleep(_PAUSE)


async def _known_everywhere(client: Client, deployment: str) -> None:
    request = DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=deployment)
    while True:
        answer = await client.workflow_service.describe_worker_deployment(request)
        state = answer.worker_deployment_info.routing_config_update_state
        if state == RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_COMPLETED:
            return
        await asyncio.sleep(_PAUSE)


class Fleet:
    """Workers of several builds of one deployment."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.deployment = f"fleet-{uuid.uuid4().hex[:8]}"

    @contextlib.asynccontextmanager
    async def build(self, build: str, outside: Outside, turn: type = TurnWorkflow) -> AsyncGenerator[None]:
        """All the workers of one build, not current yet."""
        # A client of its own, as each process has: one client takes two workers of a queue for a mistake.
        client = await temporal_client(Settings(temporal_address=self._bench.client.service_client.config.target_host))
        settings = self._bench.settings.model_copy(update={"deployment": self.deployment, "build_id": build})
        async with (
            composition.activity_worker(client, settings, names.MODELS_QUEUE, outside.model_activities),
            composition.activity_worker(client, settings, names.TOOLS_QUEUE, [outside.call_tool]),
            composition.workflow_worker(client, settings, names.TURNS_QUEUE, [turn], outside.steps),
            composition.activity_worker(client, settings, names.BODIES_QUEUE, [outside.run_body]),
            composition.workflow_worker(client, settings, names.RUNS_QUEUE, [RunWorkflow], ()),
            composition.workflow_worker(client, settings, names.SESSIONS_QUEUE, [SessionWorkflow], outside.steps),
        ):
            # Nobody switches builds before that.
            async with asyncio.timeout(60):
                for kind, queues in _QUEUES.items():
                    await _polled(client, f"{self.deployment}-{kind}", build, queues)
            yield

    @contextlib.asynccontextmanager
    async def current(self, build: str, outside: Outside, turn: type = TurnWorkflow) -> AsyncGenerator[None]:
        async with self.build(build, outside, turn):
            await self.make_current(build)
            yield

    async def make_current(self, build: str, kinds: Sequence[str] = KINDS) -> None:
        await make_current(self._bench.client, self.deployment, build, kinds)


@pytest.fixture
def fleet(bench: Bench) -> Fleet:
    return Fleet(bench)


async def said(runs: "Callable[..., Awaitable[CompletedProcess[str]]]", *words: str) -> list[str]:
    """What `perdure deploy` says, which must succeed. It is repeated while Temporal takes its time, as it asks for."""
    done = await runs(*words)
    lines = done.stdout.splitlines()
    for _ in range(3):
        if "Run the same command again" in done.stderr or "did not answer within" in done.stderr:
            done = await runs(*words)
            lines += done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    return lines


class Operator:
    """Runs `perdure deploy` against the fleet."""

    def __init__(self, bench: Bench, fleet: Fleet) -> None:
        self.builds = Builds(bench.client, fleet.deployment, bench.settings.task_queue)
        self._environment = {
            **clean_environment(),
            "PERDURE_TEMPORAL_ADDRESS": bench.client.service_client.config.target_host,
            "PERDURE_TASK_QUEUE": bench.settings.task_queue,
            "PERDURE_DEPLOYMENT": fleet.deployment,
        }

    async def runs(self, *words: str) -> "CompletedProcess[str]":
        return await asyncio.to_thread(commands.perdure, "deploy", *words, environment=self._environment)

    async def says(self, *words: str) -> list[str]:
        return await said(self.runs, *words)

    async def announce(self, build: str, *agents: str) -> None:
        """Write down what a build reads and serves, as its workers do."""
        settings = Settings(deployment=self.builds.deployment, build_id=build)
        await of_builds.announce(self.builds.client, settings, agents)


@pytest.fixture
def operator(bench: Bench, fleet: Fleet) -> Operator:
    return Operator(bench, fleet)
