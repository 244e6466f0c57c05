"""The worker: builds the parts and hands them to Temporal.

`perdure worker` runs it, and so does `python worker.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import PollerBehaviorAutoscaling, Worker, WorkerDeploymentConfig
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.endings import EndingActivities
from activities.model import ModelActivities
from activities.parking import ParkingActivities
from activities.tools import ToolActivities
from perdure.agents.registry import AgentRegistry, load_agents
from perdure.errors import PerdureError
from perdure.harness.model_step import ModelStep
from perdure.harness.parking import Parking
from perdure.harness.resuming import Resuming
from perdure.harness.tool_step import ToolStep
from perdure.harness.turn_end import TurnEnd
from perdure.models.models import Models
from perdure.protocol import names
from perdure.runtime import otel
from perdure.runtime.connect import connect
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.open import open_store
from workflows import failures, policies, steps
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

log = logging.getLogger("perdure.worker")

#: What declares passes through the sandbox: reading it again for each workflow costs as much as the workflow itself.
#: The core is pure where workflows use it (the import rules say so); the workflows themselves stay inside.
SANDBOX = SandboxedWorkflowRunner(
    restrictions=SandboxRestrictions.default.with_passthrough_modules(
        "perdure.agents",
        "perdure.errors",
        "perdure.protocol",
        "perdure.session",
        "perdure.telemetry",
        "pydantic",
        "pydantic_core",
        "opentelemetry",
        # They hold no state and make no decision, and half of what a new turn cost was reading them again.
        *(module.__name__ for module in (failures, policies, steps)),
    )
)


#: Few while it is quiet: each poll that a frozen process left open swallows one task, and a heartbeat's time with it.
POLLERS = PollerBehaviorAutoscaling(minimum=1, initial=2, maximum=20)


def workers(client: Client, store: Store, agents: AgentRegistry, models: Models, settings: Settings) -> list[Worker]:
    """One worker for each kind of work: drivers, turns, model calls, tool calls."""
    end = TurnEnd(store, agents)
    endings = EndingActivities(end)
    parking = ParkingActivities(Parking(store), Resuming(store, agents), end)
    model = ModelActivities(ModelStep(store, agents, models, settings))
    tools = ToolActivities(ToolStep(store, agents, settings))
    return [
        deciding(client, settings, names.SESSIONS_QUEUE, [SessionWorkflow]),
        deciding(client, settings, names.TURNS_QUEUE, [TurnWorkflow]),
        acting(client, settings, names.MODELS_QUEUE, [model.call_model, *_notes(endings, parking)]),
        acting(client, settings, names.TOOLS_QUEUE, [tools.call_tool]),
    ]


def _notes(endings: EndingActivities, parking: ParkingActivities) -> list[Any]:
    """Short work on the store between two steps, and after the last."""
    waits = [parking.resume_turn, parking.park_turn, parking.withdraw_inputs, parking.remind]
    return [endings.conclude_turn, endings.refuse_delivery, *waits]


def deciding(client: Client, settings: Settings, kind: str, workflows: Sequence[type]) -> Worker:
    return Worker(
        client,
        task_queue=names.queue(settings.task_queue, kind),
        workflows=workflows,
        workflow_runner=SANDBOX,
        # A session that was dropped from the cache replays its history at its next message. Too small for the
        # sessions that are busy at once is ruinous; the parked ones need not be kept, and each costs 125 KiB.
        max_cached_workflows=settings.cached_sessions,
        # The price of a dead worker: how long its sessions wait for it before another one takes over.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
        workflow_task_poller_behavior=POLLERS,
        # A turn ends with our errors. The driver declares none: a bug there must wait for its fix.
        workflow_failure_exception_types=[PerdureError] if kind == names.TURNS_QUEUE else [],
        deployment_config=_deployment(settings, kind),
    )


def acting(client: Client, settings: Settings, kind: str, activities: Sequence[Any]) -> Worker:
    return Worker(
        client,
        task_queue=names.queue(settings.task_queue, kind),
        activities=activities,
        max_concurrent_activities=500,
        # Cancellation travels with heartbeats.
        max_heartbeat_throttle_interval=timedelta(seconds=1),
        default_heartbeat_throttle_interval=timedelta(seconds=1),
        graceful_shutdown_timeout=timedelta(seconds=10),
        activity_task_poller_behavior=POLLERS,
    )


def _deployment(settings: Settings, kind: str) -> WorkerDeploymentConfig | None:
    """Versioned when the settings name a build. Turns are a deployment of their own, so that each starts on the
    newest build while its driver stays where it is.
    """
    if settings.deployment is None or settings.build_id is None:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(f"{settings.deployment}-{kind}", settings.build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[None]:
    """Everything that a worker needs, built in order and taken down in reverse."""
    async with contextlib.AsyncExitStack() as stack:
        agents = load_agents(settings.agents, settings.model)
        store = await open_store(settings.database)
        stack.push_async_callback(store.close)
        await store.migrate()
        telemetry = otel.set_up("perdure-worker")
        stack.callback(telemetry.close)
        client = await connect(settings, plugins=telemetry.plugins)
        models = Models()
        for worker in workers(client, store, agents, models, settings):
            await stack.enter_async_context(worker)
        log.info("Serving %s on %s", ", ".join(agents.names), settings.temporal_address)
        yield


async def run(settings: Settings, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set; then finish what can be finished in time."""
    async with serving(settings):
        if ready is not None:
            ready.set()
        await stop.wait()


if __name__ == "__main__":
    from perdure.cli import main

    main(["worker"])
