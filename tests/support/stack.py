"""The real product as processes: Temporal's dev server, workers, APIs, a store on disk."""

import asyncio
import sys
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from perdure.dev.supervisor import command
from perdure.dev.temporal_server import DevServer, listens
from tests.support.processes import PATIENCE, Process, clean_environment, free_port, wait_until
from tests.support.talk import Talk

if TYPE_CHECKING:
    from temporalio.client import Client

    from perdure.settings import Settings
    from perdure.store.base import Store

#: Stacks that run now, so that a failing test can show what they said.
LIVE: list["Stack"] = []

_SECRET = "a secret of the tests, shared by all processes"


def _elsewhere(work: Callable[[], None]) -> None:
    """Have it done in a thread, because the test may be inside an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


class TemporalServer:
    """A dev server on a file; it can be killed and started again."""

    def __init__(self, directory: Path, dynamic_config: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self.database = directory / "temporal.db"
        self._server = DevServer(self.database, port=free_port(), ui_port=None, dynamic_config=dynamic_config)
        self.process = self._start()

    @property
    def address(self) -> str:
        return self._server.address

    def restart(self) -> None:
        """Kill it, and start it again on the same file and port."""
        self.process.kill()
        self.process = self._start()

    def launch(self) -> None:
        """Start it again after its death, and do not wait until it answers."""
        self.process = self._launched()

    async def ready(self) -> None:
        """Wait until it answers."""
        await self._server.ready()

    def close(self) -> None:
        self.process.close()

    def _launched(self) -> Process:
        return Process("temporal", self._server.command(), self._directory / "temporal.log", clean_environment())

    def _start(self) -> Process:
        process = self._launched()
        try:
            _elsewhere(lambda: asyncio.run(self._server.ready(within=2 * PATIENCE)))
        except BaseException as error:
            error.add_note(process.output)
            process.close()
            raise
        assert process.alive, process.output
        return process


class Stack:
    """Everything that serves sessions. Start and stop its parts at will; `close` leaves nothing.

    `environment` goes to all parts, the one given to `start_worker` or `start_api` to that part only. A `temporal` that
    is given belongs to others as well: it can be neither restarted nor killed here.
    """

    def __init__(
        self,
        directory: Path,
        *,
        workers: int = 1,
        apis: int = 1,
        agents: str | None = None,
        provider: bool = False,
        database_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        temporal: TemporalServer | None = None,
    ) -> None:
        self.directory = directory
        self.workers: list[Process] = []
        self.apis: list[Process] = []
        self.api_urls: list[str] = []
        self.provider: Process | None = None
        self.provider_url = ""
        self._all: list[Process] = []
        self._borrowed = temporal is not None
        LIVE.append(self)
        try:
            self._temporal = temporal or TemporalServer(directory)
            self.environment = self._environment(agents, database_url) | dict(environment or {})
            if provider:
                self._start_provider()
            self._migrate()
            for _ in range(workers):
                self.start_worker(wait=False)
            for _ in range(apis):
                self.start_api(wait=False)
            for process in self._all:
                self._wait_ready(process)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    # --- parts ----------------------------------------------------------------------------------------------

    def start_worker(self, environment: Mapping[str, str] | None = None, *, wait: bool = True) -> Process:
        worker = self._start("worker", len(self.workers) + 1, environment or {})
        self.workers.append(worker)
        if wait:
            self._wait_ready(worker)
        return worker

    def start_api(self, environment: Mapping[str, str] | None = None, *, wait: bool = True) -> Process:
        given = {"PERDURE_PORT": str(free_port()), **(environment or {})}
        port = int(given["PERDURE_PORT"])
        api = self._start("api", len(self.apis) + 1, given)
        self.apis.append(api)
        self.api_urls.append(f"http://127.0.0.1:{port}")
        if wait:
            self._wait_ready(api)
        return api

    @property
    def temporal(self) -> TemporalServer:
        """Its own server."""
        assert not self._borrowed
        return self._temporal

    def restart_temporal(self) -> None:
        self.temporal.restart()

    def close(self) -> None:
        """Take everything down at once."""
        for process in reversed(self._all):
            process.close()
        if hasattr(self, "_temporal") and not self._borrowed:
            self.temporal.close()
        if self in LIVE:
            LIVE.remove(self)

    # --- ways in --------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.api_urls[0]

    def talk(self, api: int = 0, *, headers: dict[str, str] | None = None) -> Talk:
        """A caller of one of the APIs."""
        return Talk(self.api_urls[api], headers=headers)

    @property
    def settings(self) -> "Settings":
        """What the parts read from their environment, for use inside the test."""
        from perdure.settings import Settings

        prefix = "PERDURE_"
        return Settings.model_validate(
            {
                name.removeprefix(prefix).lower(): value
                for name, value in self.environment.items()
                if name.startswith(prefix)
            }
        )

    async def client(self) -> "Client":
        from perdure.runtime.connect import temporal_client

        return await temporal_client(self.settings)

    async def store(self) -> "Store":
        """The store that the parts share; close it."""
        from perdure.store.open import open_store

        return await open_store(self.settings.database)

    def logs(self) -> list[tuple[str, str]]:
        """The end of what each part said."""
        parts = [*self._all, self._temporal.process] if hasattr(self, "_temporal") else self._all
        return [(process.name, process.output) for process in parts]

    # --- inside ---------------------------------------------------------------------------------------------

    def _environment(self, agents: str | None, database_url: str | None) -> dict[str, str]:
        return {
            **clean_environment(),
            "PERDURE_DATA_DIR": str(self.directory / "data"),
            "PERDURE_TEMPORAL_ADDRESS": self._temporal.address,
            **({"PERDURE_TASK_QUEUE": f"test-{uuid.uuid4().hex[:12]}"} if self._borrowed else {}),
            "PERDURE_SECRET": _SECRET,
            "PYTHONUNBUFFERED": "1",
            **({"PERDURE_AGENTS": agents} if agents else {}),
            **({"PERDURE_DATABASE_URL": database_url} if database_url else {}),
        }

    def _start(self, part: str, number: int, environment: Mapping[str, str]) -> Process:
        name = f"{part}-{number}"
        options = ("--ready-file", str(self._flag(name)))
        log = self.directory / f"{name}.log"
        process = Process(name, command(part, *options), log, {**self.environment, **environment})
        self._all.append(process)
        return process

    def _migrate(self) -> None:
        """Before the others start, as an operator does; but without a process, which takes a second to start."""
        from perdure.cli import operator

        _elsewhere(lambda: operator.migrate(self.settings))

    def _start_provider(self) -> None:
        port = free_port()
        program = [sys.executable, "-m", "tests.support.provider", "--port", str(port)]
        self.provider = Process("provider", program, self.directory / "provider.log", self.environment)
        self._all.append(self.provider)
        self.provider_url = f"http://127.0.0.1:{port}"
        self.environment |= {
            "OPENAI_BASE_URL": f"{self.provider_url}/v1",
            "OPENAI_API_KEY": "sk-of-the-tests",
            "ANTHROPIC_BASE_URL": self.provider_url,
            "ANTHROPIC_API_KEY": "sk-of-the-tests",
        }

    def serves(self, process: Process) -> bool:
        """Whether it has said that it is ready."""
        flag = self._flag(process.name)
        return flag.exists() and flag.read_text() == str(process.pid)

    def _flag(self, name: str) -> Path:
        return self.directory / f"{name}.ready"

    def _wait_ready(self, process: Process) -> None:
        def ready() -> bool:
            if process is self.provider:
                return listens("127.0.0.1", int(self.provider_url.rpartition(":")[2]))
            return self.serves(process)

        wait_until(lambda: not process.alive or ready(), f"{process.name} to be ready", 2 * PATIENCE)
        assert process.alive, f"{process.name} ended:\n{process.output}"
