"""The processes of a run: Temporal, the provider, the floor's worker, the product. All end with the run."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

from perdure.agents.agent import Turns
from perdure.cli import operator
from perdure.dev.supervisor import Part, Supervisor, command
from perdure.dev.temporal_server import DevServer, listens
from perdure.runtime.connect import temporal_client
from perdure.settings import Settings

from .floor.client import FloorClient
from .product import ProductClient
from .report import progress

#: Seconds; a worker gives up what it still does after ten.
_STOPS_WITHIN = 30.0

#: The one model that is asked for; the provider answers whatever it is called.
MODEL = "openai-chat:bench"


@dataclass(frozen=True)
class Product:
    """A running product: one worker process, one API process, one store."""

    client: ProductClient
    port: int
    worker: int
    api: int
    database: str
    #: Kill the worker, and start another one; returns when that is ready.
    restart_worker: Callable[[], Awaitable[None]]
    #: Stop the worker, as a deployment does, and start another one; returns when that is ready.
    replace_worker: Callable[[], Awaitable[None]]


class Stack:
    """What floor and product share: one Temporal server, one provider."""

    def __init__(
        self,
        directory: Path,
        server: DevServer,
        temporal: int,
        client: Client,
        floor: FloorClient,
        provider: int,
    ) -> None:
        """`temporal`: the id of the server's process. `provider`: the provider's port."""
        self.directory = directory
        self.temporal = temporal
        self.client = client
        self.floor = floor
        self._server = server
        self._provider = provider

    @contextlib.asynccontextmanager
    async def product(
        self, name: str, database: str | None = None, turns: Turns = "child", agents: str = "bench.agent:agent"
    ) -> AsyncGenerator[Product]:
        """A product with queues, data and processes of its own."""
        data = self.directory / name
        port = free_port()
        environment = self._environment(name, data, port) | {"PERDURE_TURNS": turns, "PERDURE_AGENTS": agents}
        if database:
            environment["PERDURE_DATABASE_URL"] = database
        pids: dict[str, int] = {}
        async with supervised(data / "logs") as supervisor:
            store = Settings.model_validate({"data_dir": data, "database_url": database})
            await asyncio.to_thread(operator.migrate, store)
            await supervisor.start(*(_part(name, data, environment, pids) for name in ("worker", "api")))
            url = database or f"sqlite:///{data / 'perdure.db'}"

            async def restart_worker() -> None:
                os.kill(pids["worker"], signal.SIGKILL)
                await supervisor.start(_part("worker", data, environment, pids))

            async def replace_worker() -> None:
                os.kill(pids["worker"], signal.SIGTERM)
                async with asyncio.timeout(_STOPS_WITHIN):
                    while _lives(pids["worker"]):
                        await asyncio.sleep(0.01)
                await supervisor.start(_part("worker", data, environment, pids))

            yield Product(ProductClient(port), port, pids["worker"], pids["api"], url, restart_worker, replace_worker)

    def _environment(self, name: str, data: Path, port: int) -> dict[str, str]:
        return {
            **_temporal_environment(self._server),
            "PERDURE_DATA_DIR": str(data),
            "PERDURE_TASK_QUEUE": f"bench-{name}",
            "PERDURE_MODEL": MODEL,
            "PERDURE_HOST": "127.0.0.1",
            "PERDURE_PORT": str(port),
            "PERDURE_LOG_LEVEL": "warning",
            "PERDURE_SECRET": "only for this run",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{self._provider}/v1",
            "OPENAI_API_KEY": "none",
        }


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncGenerator[Stack]:
    """Start what floor and product share, and the floor."""
    temporal = DevServer(directory / "temporal.db", free_port(), ui_port=None)
    provider = free_port()
    reports = directory / "reports"
    async with supervised(directory / "logs") as supervisor, contextlib.AsyncExitStack() as stack:
        pids: list[int] = []

        async def temporal_is_ready(pid: int) -> None:
            await temporal.ready()
            pids.append(pid)

        await supervisor.start(
            Part("temporal", temporal.command(), temporal_is_ready, shown=False, patience=5.0),
            Part("provider", _module("bench.provider", str(provider)), lambda _: _listening(provider)),
        )
        client = await temporal_client(Settings(temporal_address=temporal.address))
        floor = FloorClient(client, reports)
        stack.callback(floor.close)
        flag = directory / "floor.ready"
        program = _module("bench.floor.worker", str(reports), str(flag))
        ready = Part("floor", program, lambda pid: _wait_for_flag(flag, pid), _temporal_environment(temporal))
        await supervisor.start(ready)
        yield Stack(directory, temporal, pids[0], client, floor, provider)


@contextlib.asynccontextmanager
async def supervised(logs: Path) -> AsyncGenerator[Supervisor]:
    supervisor = Supervisor(logs, progress)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def free_port() -> int:
    """A port that is free, below those that the kernel hands to outgoing connections in the meantime."""
    while True:
        port = random.randint(30_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _part(name: str, data: Path, environment: dict[str, str], pids: dict[str, int]) -> Part:
    flag = data / f"{name}.ready"

    async def ready(pid: int) -> None:
        await _wait_for_flag(flag, pid)
        pids[name] = pid

    return Part(name, command(name, "--ready-file", str(flag)), ready, environment)


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _temporal_environment(temporal: DevServer) -> dict[str, str]:
    return {
        "PERDURE_TEMPORAL_ADDRESS": temporal.address,
        "PERDURE_TEMPORAL_NAMESPACE": temporal.namespace,
        "PERDURE_TEMPORAL_TLS": "false",
        "PYTHONUNBUFFERED": "1",
    }


async def _listening(port: int) -> None:
    while not listens("127.0.0.1", port):
        await asyncio.sleep(0.02)


async def _wait_for_flag(flag: Path, pid: int) -> None:
    """Wait until the process with this id has written its id there."""
    while not flag.exists() or flag.read_text() != str(pid):
        await asyncio.sleep(0.02)
