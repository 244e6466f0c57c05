"""The worker: builds its parts and registers them with Temporal.

`perdure worker` runs it, and so does `python worker.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import (
    PollerBehaviorAutoscaling,
    UnsandboxedWorkflowRunner,
    Worker,
    WorkerDeploymentConfig,
    WorkflowInstance,
    WorkflowInstanceDetails,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.children import ChildActivities
from activities.model import ModelActivities
from activities.runs import RunActivities
from activities.tools import ToolActivities
from activities.turns import TurnActivities
from perdure.agents.registry import AgentRegistry, load_agents, load_runs, pools_of
from perdure.agents.run import RunRegistry
from perdure.errors import Misconfigured, PerdureError
from perdure.harness.harness import Harness
from perdure.harness.tools.prices import check_prices
from perdure.harness.tools.toolbox import check_tools
from perdure.models.base import Models
from perdure.protocol import names
from perdure.runtime.connect import secret, telemetry_choices, temporal_client
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.inbox import Dispatches
from perdure.runtime.signals import Signals
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.open import checked_store
from perdure.telemetry import setup
from workflows import family, outcomes, policies, versions
from workflows.run import RunWorkflow
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

log = logging.getLogger("perdure.worker")

#: Modules that are not imported again for each workflow: that would cost as much as the workflow itself.
#: The import rules keep the core pure where workflows use it; the workflow modules stay inside the sandbox.
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
        # They hold no state, and importing them again was half of the cost of a new turn.
        *(module.__name__ for module in (family, policies, outcomes, versions)),
    )
)


class WarmingRunner(UnsandboxedWorkflowRunner):
    """Says which session begins to be served here: what its model call will need is read while its driver decides."""

    def __init__(self, warm: Callable[[str], None]) -> None:
        self._warm = warm

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        self._warm(names.session_of(det.info.workflow_id))
        return super().create_instance(det)


#: Few polls while idle: each poll that a frozen process left open takes one task, which is lost until its time-out.
POLLERS = PollerBehaviorAutoscaling(minimum=1, initial=2, maximum=20)

#: How long activities may continue after the worker was asked to stop.
GRACE = timedelta(seconds=10)


def workers(
    client: Client,
    store: Store,
    agents: AgentRegistry,
    models: Models,
    settings: Settings,
    runs: RunRegistry | None = None,
) -> list[Worker]:
    """One worker for each kind of work: drivers, turns, model calls, tool calls.

    Each has slots of its own: tools that take long keep neither decisions nor model calls waiting.
    """
    signals = Signals(store, DriverClient(client, settings.task_queue), agents, ui_detail=settings.ui_detail == "on")
    dispatch = Dispatches(store, signals, limit=settings.max_inbox).dispatch_owned
    harness = Harness(
        store,
        agents,
        models,
        settings,
        secret=callback_secret(settings),
        runs=runs,
        dispatch=dispatch,
        worker=client.identity,
    )
    turns, model, tools = TurnActivities(harness), ModelActivities(harness), ToolActivities(harness)
    if settings.only_pools:
        return [pool_worker(client, settings, harness, pool) for pool in settings.only_pools]
    children = ChildActivities(harness, signals)
    family = [
        children.dispatch_children,
        children.stop_children,
        children.collect_children,
        children.show_inputs,
        children.look_at_children,
        children.call_back,
    ]
    # The steps of turns beside tool calls. The server hands them to the worker of their turn, with its decision.
    steps = [model.call_model, turns.resume_turn, turns.park_turn, turns.park_programs]
    # Short work on the store, between steps and after the last one.
    waits = [turns.withdraw_inputs, turns.remind]
    ends = [turns.conclude_turn, turns.refuse_delivery, turns.attend_session, turns.close_session]
    # Each starts before those that schedule work on its queue: a queue belongs to a build from its first poll on.
    return [
        *(pool_worker(client, settings, harness, pool) for pool in _declared(agents, settings)),
        activity_worker(client, settings, names.TOOLS_QUEUE, [tools.call_tool, tools.run_program]),
        # The steps, too: drivers with versions, and older builds, ask for them here.
        activity_worker(client, settings, names.MODELS_QUEUE, [*steps, *waits, *ends, *family, turns.rebuild_session]),
        activity_worker(client, settings, names.BODIES_QUEUE, [RunActivities(harness, signals).run_body]),
        workflow_worker(client, settings, names.TURNS_QUEUE, [TurnWorkflow], steps, harness.warm),
        workflow_worker(client, settings, names.RUNS_QUEUE, [RunWorkflow], ()),
        workflow_worker(client, settings, names.SESSIONS_QUEUE, [SessionWorkflow], steps, harness.warm),
    ]


def pool_worker(client: Client, settings: Settings, harness: Harness, pool: str) -> Worker:
    """Runs the tools of a pool, and nothing else."""
    return activity_worker(client, settings, names.tools_queue(pool), [ToolActivities(harness, pool).call_tool])


def _declared(agents: AgentRegistry, settings: Settings) -> Sequence[str]:
    """The pools that a worker serves beside everything else."""
    return pools_of(agents) if settings.pools.strip() == names.ALL_POOLS else ()


def _runner(settings: Settings, warm: Callable[[str], None] | None) -> WorkflowRunner:
    if settings.sandbox == "on":
        return SANDBOX
    return UnsandboxedWorkflowRunner() if warm is None else WarmingRunner(warm)


def workflow_worker(
    client: Client,
    settings: Settings,
    kind: str,
    workflows: Sequence[type],
    steps: Sequence[Any],
    warm: Callable[[str], None] | None = None,
) -> Worker:
    return Worker(
        client,
        task_queue=names.queue(settings.task_queue, kind),
        workflows=workflows,
        activities=steps,
        # Many tests run in the sandbox: what it forbids is found there.
        workflow_runner=_runner(settings, warm),
        # A session that was evicted from the cache replays its history at its next message. The cache must hold all
        # busy sessions, or throughput collapses. Parked sessions need no place; each place costs 125 KiB.
        max_cached_workflows=settings.cached_sessions,
        # Workflow tasks share one processor, and each has a time limit; tasks that still wait at the server have none.
        # Too many at once would all time out and be retried. A poll occupies a slot: no more polls than slots.
        max_concurrent_workflow_tasks=settings.concurrent_decisions,
        # How long the sessions of a dead worker wait for it before another one takes over.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
        workflow_task_poller_behavior=replace(POLLERS, maximum=min(POLLERS.maximum, settings.concurrent_decisions)),
        # Our errors fail a turn. Nothing fails a driver: with a bug in its code it waits for the fix.
        workflow_failure_exception_types=[PerdureError] if kind == names.TURNS_QUEUE else [],
        **_ACTIVITIES,
        **_build(settings, kind),
    )


def activity_worker(client: Client, settings: Settings, kind: str, activities: Sequence[Any]) -> Worker:
    return Worker(
        client,
        task_queue=names.queue(settings.task_queue, kind),
        activities=activities,
        **_ACTIVITIES,
        **_build(settings, kind),
    )


class _Activities(TypedDict):
    max_concurrent_activities: int
    max_heartbeat_throttle_interval: timedelta
    default_heartbeat_throttle_interval: timedelta
    graceful_shutdown_timeout: timedelta
    activity_task_poller_behavior: PollerBehaviorAutoscaling


_ACTIVITIES: _Activities = {
    "max_concurrent_activities": 500,
    # An activity learns of its cancellation by its heartbeats.
    "max_heartbeat_throttle_interval": timedelta(seconds=1),
    "default_heartbeat_throttle_interval": timedelta(seconds=1),
    "graceful_shutdown_timeout": GRACE,
    "activity_task_poller_behavior": POLLERS,
}


def callback_secret(settings: Settings) -> bytes | None:
    """What the tokens of callbacks from other servers are derived from, if they can reach us."""
    return None if settings.public_url is None else secret(settings)


class _Build(TypedDict, total=False):
    deployment_config: WorkerDeploymentConfig
    build_id: str


def _build(settings: Settings, kind: str) -> _Build:
    """Worker versioning, if the settings name a build.

    Turns have a deployment of their own: each starts on the newest build while its driver stays on its own. Activities
    belong to the same deployment: those of a turn run on the turn's build, those of a driver on the current one.
    """
    if settings.deployment is None or settings.build_id is None:
        # Without a name the SDK makes one from the code of all modules, for a seventh of a second.
        return {"build_id": settings.build_id or "unversioned"}
    unit = names.SESSIONS_QUEUE if kind in (names.SESSIONS_QUEUE, names.RUNS_QUEUE) else names.TURNS_QUEUE
    version = WorkerDeploymentVersion(f"{settings.deployment}-{unit}", settings.build_id)
    config = WorkerDeploymentConfig(
        version=version, use_worker_versioning=True, default_versioning_behavior=VersioningBehavior.PINNED
    )
    return {"deployment_config": config}


@contextlib.asynccontextmanager
async def running(workers: Sequence[Worker]) -> AsyncGenerator[None]:
    """Run all workers. They stop polling together: one that went on could start work that needs the others."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        try:
            yield
        finally:
            await asyncio.gather(*(worker.shutdown() for worker in workers))


async def declared(settings: Settings) -> tuple[AgentRegistry, RunRegistry, Models]:
    """The agents and the runs, and the models for them, with all that they declare checked."""
    agents = load_agents(settings.agents, settings.model, settings.turns)
    runs = load_runs(settings.runs, settings.agents)
    models = Models(silence=settings.model_silence)
    if not settings.only_pools:
        # Workers of a pool call no models, and may have no key for them.
        models.check(agents)
        check_prices(agents, settings)
    await check_tools(agents)
    return agents, runs, models


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[None]:
    """Build all that a worker needs, and close it in reverse order."""
    async with contextlib.AsyncExitStack() as stack:
        # Before anything is opened: a wrong declaration must fail the start, not the first message.
        agents, runs, models = await declared(settings)
        if (settings.deployment is None) != (settings.build_id is None):
            raise Misconfigured("PERDURE_DEPLOYMENT and PERDURE_BUILD_ID belong together: set both, or neither.")
        store = await stack.enter_async_context(checked_store(settings.database))
        telemetry = setup.set_up("perdure-worker", telemetry_choices(settings), listen=settings.metrics_listener)
        stack.callback(telemetry.close)
        client = await temporal_client(settings, plugins=telemetry.plugins)
        await stack.enter_async_context(running(workers(client, store, agents, models, settings, runs)))
        from perdure.runtime.deploys import builds

        if settings.deployment is None:
            report = builds.warn_unversioned(client, settings)
        else:
            report = builds.announce(client, settings, agents.names)
        stack.callback(asyncio.create_task(report).cancel)
        if not settings.only_pools:
            looking = builds.warn_of_pools(client, settings.task_queue, pools_of(agents))
            stack.callback(asyncio.create_task(looking).cancel)
        log.info("Serving %s on %s", ", ".join(agents.names), settings.temporal_address)
        yield


async def run(settings: Settings, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set; then let activities finish within the grace period."""
    async with serving(settings):
        if ready is not None:
            ready.set()
        await stop.wait()


if __name__ == "__main__":
    from perdure.cli.commands import main

    main(["worker"])
