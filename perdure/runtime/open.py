"""From the settings to `Sessions`: for the API, and for any other program through `perdure.connect`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from temporalio.client import Plugin

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry, load_agents
from perdure.agents.run import RunRegistry
from perdure.settings import Settings, read_settings
from perdure.store.base import Store
from perdure.store.open import checked_store

from .connect import secret, temporal_client
from .local import beside_dev
from .sessions import Sessions


@asynccontextmanager
async def connect(
    *,
    address: str | None = None,
    database: str | None = None,
    data_dir: str | Path | None = None,
    agents: Sequence[Agent] | None = None,
) -> AsyncGenerator[Sessions]:
    """Start sessions, deliver to them, answer and follow them: `async with perdure.connect() as sessions: …`.

    The `PERDURE_…` variables of the environment say where Temporal and the store are, as for an API process.
    `address` (of Temporal), `database` (as in `PERDURE_DATABASE_URL`) and `data_dir` (of the SQLite store, where no
    database is named) win over them. Where no address is named, a `perdure dev` that runs on this store is found.
    `agents` are those that are declared in this program, by default those of `PERDURE_AGENTS` where it is set. Only
    with them may an approval change arguments, and only with them does `while_waiting="deny"` count here.

    The store must be there, with a schema of this version, or `Misconfigured` or `SchemaOutdated` is raised:
    `perdure migrate` makes both. Temporal may be away: what is accepted then has `delayed` in its receipt, and the
    sweeper that each API process runs signals the workflow later. This function runs none, and neither do workers.
    Where no API process runs, keep `sessions.sweeper.running()` and `sessions.reconciler.running()` open in a process
    that stays.
    """
    settings = beside_dev(read_settings(temporal_address=address, database_url=database, data_dir=data_dir))
    known = _known(settings, agents)
    async with checked_store(settings.database) as store:
        yield await open_sessions(settings, store, agents=known)


async def open_sessions(
    settings: Settings,
    store: Store,
    *,
    agents: AgentRegistry | None = None,
    runs: RunRegistry | None = None,
    plugins: Sequence[Plugin] = (),
) -> Sessions:
    """The sessions of this store. Temporal is connected to at the first call, so it need not be there yet."""
    return Sessions(
        store,
        await temporal_client(settings, plugins=plugins, lazy=True),
        secret=secret(settings),
        task_queue=settings.task_queue,
        ui_url=settings.temporal_ui_url,
        ui_detail=settings.ui_detail == "on",
        agents=agents,
        runs=runs,
        inbox_limit=settings.max_inbox,
    )


def _known(settings: Settings, agents: Sequence[Agent] | None) -> AgentRegistry | None:
    """The agents that are declared in this program, if there are any."""
    if agents is not None:
        return AgentRegistry(agents) if agents else None
    # The default of the setting is the demo, which says nothing about this program.
    named = "agents" in settings.model_fields_set
    return load_agents(settings.agents, settings.model, settings.turns) if named else None
