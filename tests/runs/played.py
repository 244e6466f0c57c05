"""A run over a store in memory. Each call of `enter` is an attempt, as a worker makes it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from perdure import Agent, AgentRegistry, Run
from perdure.agents.run import RunFunction, RunRegistry
from perdure.harness.harness import Harness
from perdure.protocol.events import Event, cancel_requested
from perdure.protocol.runs import RunBody, RunLooked
from perdure.protocol.wire import JsonObject
from perdure.runtime.runs import Runs
from perdure.runtime.signals import Signals
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, DeliveryRow
from perdure.store.follow import read_all
from perdure.store.open import open_store
from perdure.store.runs import RunRecord
from perdure.store.values import Attempt, NewSession
from perdure.testing import ScriptedModel

CLERK = Agent("clerk")


class Deaf:
    """Nobody gets its signals: the test is the worker."""

    def __init__(self) -> None:
        self.delivered: list[str] = []

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        return True

    async def start_run(self, session: NewSession) -> bool:
        return True

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool:
        self.delivered.append(row.delivery_id)
        return True

    async def deliver_all(self, session_id: str) -> bool:
        return True

    async def cancel(self, request: CancelRequest) -> bool:
        return True


class PlayedRun:
    def __init__(self, store: Store, function: RunFunction, **types: Any) -> None:
        self.store = store
        self.drivers = Deaf()
        #: Whether the worker is to stop.
        self.leaving = asyncio.Event()
        self.id = ""
        self._attempts = 0
        self.serve(function, **types)

    def serve(self, function: RunFunction, *, agent: Agent = CLERK, **types: Any) -> None:
        """From now on the worker has this function, and this agent: another build."""
        self.run = Run("job", function, **types)
        agents = AgentRegistry([agent])
        harness = Harness(self.store, agents, _Models(), Settings(agents=""), runs=RunRegistry([self.run]))
        self.harness = harness
        self._runner = harness.runs

    async def start(self, given: Any = None) -> None:
        signals: Signals = self.drivers  # type: ignore[assignment]
        self.id = (await Runs(self.store, signals).start("job", given)).run_id

    async def enter(self, *, deaths: int = 0) -> RunLooked:
        self._attempts += 1
        attempt = Attempt(1, generation=self._attempts, deaths=deaths)
        return await self._runner.look(RunBody(session_id=self.id), attempt, self.drivers, self.leaving.wait)

    async def record(self) -> RunRecord:
        record = await self.store.run(self.id)
        assert record is not None
        return record

    async def request_cancel(self) -> None:
        await self.store.cancel(self.id, None, cancel_requested)

    async def events(self) -> list[Event]:
        return [event async for event in read_all(self.store, self.id)]


class _Models:
    def model(self, name: str) -> Any:
        return ScriptedModel([])


@asynccontextmanager
async def played(
    function: RunFunction, given: Any = None, *, url: str = "sqlite:///:memory:", **types: Any
) -> AsyncGenerator[PlayedRun]:
    """A run of this function that nobody has entered yet."""
    store = await open_store(url)
    try:
        await store.migrate()
        run = PlayedRun(store, function, **types)
        await run.start(given)
        yield run
    finally:
        await store.close()
