"""Faults of the processes and connections of a product: one after the other, all of them sooner or later."""

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.support.chaos.evidence import Absence
from tests.support.chaos.world import World, dies_at
from tests.support.postgres import Cluster
from tests.support.processes import Process
from tests.support.proxy import Proxy
from tests.support.stack import Stack, TemporalServer
from tests.support.waiting import until

Fault: TypeAlias = Callable[[], Awaitable[None]]

OTHER_AGENT = "tests.chaos.other_agent:agent"

_POINTS = (
    *("model_before_begin", "model_after_begin", "model_mid_stream", "model_before_settle", "model_after_settle"),
    *("tool_before_intent", "tool_after_intent", "tool_after_effect", "tool_before_settle", "tool_after_settle"),
    *("park_before_commit", "park_after_commit", "resume_before_commit", "resume_after_commit"),
)


class Lines:
    """The connections that can go dead: each part reaches what it needs through a relay of its own."""

    def __init__(self, temporal: TemporalServer, cluster: Cluster | None, stack: ExitStack) -> None:
        port = int(temporal.address.rpartition(":")[2])
        self.api_temporal = stack.enter_context(Proxy("127.0.0.1", port))
        self.worker_temporal = stack.enter_context(Proxy("127.0.0.1", port))
        self.worker_postgres = stack.enter_context(Proxy("127.0.0.1", cluster.port)) if cluster else None

    @property
    def all(self) -> list[Proxy]:
        lines = (self.api_temporal, self.worker_temporal, self.worker_postgres)
        return [line for line in lines if line is not None]

    @property
    def of_api(self) -> dict[str, str]:
        return {"PERDURE_TEMPORAL_ADDRESS": self.api_temporal.address}

    @property
    def of_worker(self) -> dict[str, str]:
        line = self.worker_postgres
        database = {"PERDURE_DATABASE_URL": f"postgresql://perdure@{line.address}/postgres"} if line else {}
        return {"PERDURE_TEMPORAL_ADDRESS": self.worker_temporal.address, **database}


class Hand:
    """Keeps two workers and two APIs alive, and does to them, and to what they need, what the dice say."""

    def __init__(
        self, world: World, lines: Lines, cluster: Cluster | None, directory: Path, chance: random.Random
    ) -> None:
        self._world = world
        self._lines = lines
        self._cluster = cluster
        self._directory = directory
        self._chance = chance
        self._number = 0
        self._doomed_come = True
        self._none_are_replaced = False
        self._temporal_is_left_dead = False
        self._others: list[Process] = []
        self._absences: list[Absence] = []
        self.done: list[str] = []

    @property
    def absences(self) -> list[Absence]:
        return list(self._absences)

    async def keep_alive(self) -> None:
        """Replace whatever has died, as a supervisor does; ends when it is cancelled."""
        while True:
            await asyncio.sleep(0.2)
            self.replace_the_dead()

    def replace_the_dead(self) -> None:
        while not self._none_are_replaced and len(self._workers()) < 2:
            self._start_worker()
        while sum(api.alive for api in self._stack.apis) < 2:
            self._stack.start_api(self._lines.of_api, wait=False)
        if not (self._stack.temporal.process.alive or self._temporal_is_left_dead):
            self._stack.temporal.launch()

    async def do_everything(self, seconds: float) -> None:
        """Faults until the time has passed; none comes again before all have come."""
        end = time.monotonic() + seconds
        bag: list[Fault] = []
        while (left := end - time.monotonic()) > 0:
            bag = bag or self._shuffled()
            fault = bag.pop()
            await asyncio.sleep(min(left, self._chance.uniform(1.0, 5.0)))
            name = getattr(fault, "__name__", "").strip("_").replace("_", " ")
            log(name)
            self.done.append(name)
            await fault()

    async def make_well(self) -> None:
        """From now on nothing fails any more."""
        self._doomed_come = False
        self._none_are_replaced = False
        for line in self._lines.all:
            line.resume()
        for other in self._others:
            other.kill()
        # Those that would die later are replaced now.
        for worker in self._workers():
            worker.kill()
        log("all is well again")

    # --- faults ---------------------------------------------------------------------------------------------

    def _shuffled(self) -> list[Fault]:
        faults: list[Fault] = [
            *(self._kill_worker, self._kill_worker, self._kill_api, self._kill_temporal, self._kill_everything),
            *(self._freeze_worker, self._stall_temporal, self._no_workers, self._start_a_worker_of_another_agent),
            *(self._cut_workers_from_temporal, self._cut_apis_from_temporal),
        ]
        if self._cluster is not None:
            faults += [self._kill_postgres, self._kill_postgres_while_it_recovers, self._cut_workers_from_postgres]
        self._chance.shuffle(faults)
        return faults

    async def _kill_worker(self) -> None:
        self._chance.choice(self._workers() or self._stack.workers).kill()

    async def _kill_api(self) -> None:
        self._chance.choice([api for api in self._stack.apis if api.alive] or self._stack.apis).kill()

    async def _kill_temporal(self) -> None:
        with self._absence("temporal away"):
            self._temporal_is_left_dead = True
            self._stack.temporal.process.kill()
            await asyncio.sleep(self._chance.choice([0.0, 1.0, 6.0]))
            self._temporal_is_left_dead = False
            await self._temporal_answers()

    async def _kill_everything(self) -> None:
        with self._absence("temporal away"):
            self._world.kill_everything()
            if self._cluster is not None:
                await self._restart_postgres()
            await self._temporal_answers()

    async def _freeze_worker(self) -> None:
        frozen = self._chance.choice(self._workers() or self._stack.workers)
        with self._absence("frozen"):
            frozen.stop()
            await asyncio.sleep(self._chance.uniform(1.0, 12.0))
            frozen.cont()

    async def _stall_temporal(self) -> None:
        process = self._stack.temporal.process
        with self._absence("temporal away"):
            process.stop()
            await asyncio.sleep(self._chance.uniform(3.0, 10.0))
            process.cont()

    async def _no_workers(self) -> None:
        self._none_are_replaced = True
        for worker in self._workers():
            worker.kill()
        await asyncio.sleep(self._chance.uniform(2.0, 6.0))
        self._none_are_replaced = False

    async def _start_a_worker_of_another_agent(self) -> None:
        """It serves another agent, and polls the same queues."""
        other = self._stack.start_worker({**self._lines.of_worker, "PERDURE_AGENTS": OTHER_AGENT}, wait=False)
        self._others.append(other)
        await asyncio.sleep(self._chance.uniform(5.0, 15.0))
        other.signal(self._chance.choice([signal.SIGTERM, signal.SIGKILL]))

    async def _cut_workers_from_temporal(self) -> None:
        with self._absence("temporal away"):
            await self._cut(self._lines.worker_temporal)

    async def _cut_apis_from_temporal(self) -> None:
        await self._cut(self._lines.api_temporal)

    async def _cut_workers_from_postgres(self) -> None:
        assert self._lines.worker_postgres is not None
        with self._absence("postgres away"):
            await self._cut(self._lines.worker_postgres)

    async def _cut(self, line: Proxy) -> None:
        """Half open for a while; then broken, or continuing as if nothing had happened."""
        line.stall()
        await asyncio.sleep(self._chance.uniform(2.0, 12.0))
        if self._chance.random() < 0.7:
            line.drop()
        else:
            line.resume()

    async def _kill_postgres(self) -> None:
        with self._absence("postgres away"):
            await self._restart_postgres(self._chance.choice([0.0, 3.0]))

    async def _kill_postgres_while_it_recovers(self) -> None:
        cluster = self._cluster
        assert cluster is not None
        with self._absence("postgres away"):
            await asyncio.to_thread(cluster.kill)
            await asyncio.to_thread(cluster.start_again, wait=False)
            await until(lambda: cluster.running, "PostgreSQL to begin")
            await asyncio.sleep(self._chance.uniform(0.0, 0.2))
            await self._restart_postgres()

    async def _restart_postgres(self, pause: float = 0.0) -> None:
        assert self._cluster is not None
        await asyncio.to_thread(self._cluster.kill)
        await asyncio.sleep(pause)
        await asyncio.to_thread(self._cluster.start_again)

    # --- processes ------------------------------------------------------------------------------------------

    @property
    def _stack(self) -> Stack:
        return self._world.stack

    def _workers(self) -> list[Process]:
        return [worker for worker in self._stack.workers if worker.alive and worker not in self._others]

    def _start_worker(self) -> None:
        """Every third one is going to die by itself, at some place and some pass."""
        self._number += 1
        doomed = self._doomed_come and self._chance.random() < 1 / 3
        point = f"{self._chance.choice(_POINTS)}:{self._chance.randrange(1, 8)}"
        death = dies_at(point, self._directory / f"dead-{self._number}") if doomed else {}
        # A session changes between the two as its steps run on the one worker or the other.
        turns = {"PERDURE_TURNS": self._chance.choice(("child", "inline"))}
        self._stack.start_worker({**self._lines.of_worker, **death, **turns}, wait=False)

    async def _temporal_answers(self) -> None:
        if not self._stack.temporal.process.alive:
            self._stack.temporal.launch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await self._stack.temporal.ready()

    @contextmanager
    def _absence(self, kind: str) -> Generator[None]:
        began = time.time()
        try:
            yield
        finally:
            self._absences.append(Absence(kind, began, time.time()))


def log(what: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stdout.flush()
