"""A driver stays on the build that started it; each turn starts on the newest one."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import pytest
from temporalio import workflow
from temporalio.api.workflowservice.v1 import SetWorkerDeploymentCurrentVersionRequest
from temporalio.client import Client
from temporalio.service import RPCError

import worker as composition
from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from perdure.runtime.connect import connect
from perdure.session.turn import Breath, run_turn
from perdure.settings import Settings
from tests.support.stack import TemporalServer
from workflows.session import SessionWorkflow
from workflows.steps import ActivitySteps
from workflows.turn import TurnWorkflow

from .harness import Bench, Outside


@workflow.defn(name=names.TURN_WORKFLOW, sandboxed=False)
class NewerTurn:
    """The next build's turn: it signs its model calls."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        end = await run_turn(request.model_copy(update={"agent": "newer"}), ActivitySteps())
        assert not isinstance(end, Breath)
        return end


class Fleet:
    """Workers of several builds of one deployment."""

    def __init__(self, bench: Bench, deployment: str, outside: Outside) -> None:
        self._bench = bench
        self._deployment = deployment
        self._outside = outside

    def _settings(self, build: str | None) -> Settings:
        deployment = self._deployment if build else None
        return Settings(task_queue=self._bench.settings.task_queue, deployment=deployment, build_id=build)

    @contextlib.asynccontextmanager
    async def build(self, build: str, turn: type) -> AsyncGenerator[None]:
        client, settings = self._bench.client, self._settings(build)
        async with (
            composition.deciding(client, settings, names.SESSIONS_QUEUE, [SessionWorkflow]),
            composition.deciding(client, settings, names.TURNS_QUEUE, [turn]),
        ):
            for kind in (names.SESSIONS_QUEUE, names.TURNS_QUEUE):
                await self._make_current(client, f"{self._deployment}-{kind}", build)
            yield

    @contextlib.asynccontextmanager
    async def acting(self) -> AsyncGenerator[None]:
        activities = self._outside.model_activities
        async with composition.acting(self._bench.client, self._settings(None), names.MODELS_QUEUE, activities):
            yield

    async def _make_current(self, client: Client, deployment: str, build: str) -> None:
        request = SetWorkerDeploymentCurrentVersionRequest(
            namespace=client.namespace, deployment_name=deployment, build_id=build, identity="tests"
        )
        async with asyncio.timeout(20):
            while True:
                # The server learns of a build with its first poll.
                with contextlib.suppress(RPCError):
                    await client.workflow_service.set_worker_deployment_current_version(request)
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench(temporal_server: TemporalServer) -> Bench:
    return Bench(await connect(Settings(temporal_address=temporal_server.address)))


async def build_of(client: Client, workflow_id: str) -> str:
    description = await client.get_workflow_handle(workflow_id).describe()
    return description.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


async def test_a_pinned_driver_runs_its_turns_on_the_newest_build(bench: Bench) -> None:
    outside = Outside()
    fleet = Fleet(bench, f"fleet-{uuid.uuid4().hex[:8]}", outside)
    async with fleet.acting(), fleet.build("1", TurnWorkflow):
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await session.heard("dlv_1")

        async with fleet.build("2", NewerTurn):
            await session.deliver("dlv_2")
            await session.heard("dlv_1", "dlv_2")

            assert [call.agent for call in outside.model_calls] == ["demo", "newer"]
            assert await build_of(bench.client, names.turn_workflow(session.handle.id, 1)) == "2"


async def test_a_parked_driver_moves_to_the_newest_build_between_two_turns(bench: Bench) -> None:
    outside = Outside()
    fleet = Fleet(bench, f"fleet-{uuid.uuid4().hex[:8]}", outside)
    async with fleet.acting(), fleet.build("1", TurnWorkflow):
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await session.heard("dlv_1")
        assert await build_of(bench.client, session.handle.id) == "1"

        async with fleet.build("2", NewerTurn):
            await session.deliver("dlv_2")
            await session.deliver("dlv_1")
            await session.deliver("dlv_3")
            await session.heard("dlv_1", "dlv_2", "dlv_3")

            assert await build_of(bench.client, session.handle.id) == "2"
