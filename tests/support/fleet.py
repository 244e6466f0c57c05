"""Builds of a versioned deployment, as an operator switches them."""

import asyncio
import contextlib
from collections.abc import Sequence

from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.enums.v1 import RoutingConfigUpdateState
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    DescribeWorkerDeploymentVersionRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.protocol import names

#: Each is a deployment of its own. Newer turns work for older drivers, so they go first.
KINDS = (names.TURNS_QUEUE, names.SESSIONS_QUEUE)

#: How many task queues the workers of each deployment poll.
_QUEUES = {names.TURNS_QUEUE: 3, names.SESSIONS_QUEUE: 1}


async def make_current(client: Client, deployment: str, build: str, kinds: Sequence[str] = KINDS) -> None:
    """Make the build the current one of these deployments, and wait until all of its queues know."""
    for kind in kinds:
        async with asyncio.timeout(60):
            await _polled(client, f"{deployment}-{kind}", build, _QUEUES[kind])
            await _set_current(client, f"{deployment}-{kind}", build)
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
        await asyncio.sleep(0.02)


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
        await asyncio.sleep(0.02)


async def _known_everywhere(client: Client, deployment: str) -> None:
    request = DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=deployment)
    while True:
        answer = await client.workflow_service.describe_worker_deployment(request)
        state = answer.worker_deployment_info.routing_config_update_state
        if state == RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_COMPLETED:
            return
        await asyncio.sleep(0.02)
