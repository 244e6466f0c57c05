"""`perdure dev`: Temporal's dev server, the worker and the API, started and stopped together."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from perdure.agents.agent import DEMO, Agent
from perdure.agents.registry import AgentRegistry, load_agents, load_runs
from perdure.errors import Conflict, Invalid
from perdure.protocol.names import ALL_POOLS
from perdure.runtime.local import ADDRESS, API, LOCK, is_owned, read_flag, write_api_url, write_temporal_address
from perdure.settings import Settings
from perdure.store.open import close_folder
from perdure.telemetry.logs import check_level

from .reload import Reload, Sources, source_roots
from .supervisor import Part, Supervisor, command
from .temporal_server import DevServer

# How long a port may stay busy: after a `kill -9` of an earlier `perdure dev`, its children take a moment to exit.
_PORT_PATIENCE = 2.0
#: Where a chat looks for an API by itself.
_DEFAULT_URL = "http://127.0.0.1:8000"
_KILLABLE = ("worker", "api")
#: Our files in the data directory and in its folder of logs.
_FILES = ("perdure.db*", "temporal.db*", "secret", "secret.[0-9]*", "dev.lock", "*.ready", "logs")
_LOGS = ("temporal*.log", "migration*.log", "worker*.log", "api*.log")


class Occupied(Conflict):
    """Another process uses the data directory or a port."""

    code = "occupied"


@dataclass(frozen=True)
class DevOptions:
    """The options of one `perdure dev`."""

    data_dir: Path
    agents: str | None
    host: str = "127.0.0.1"
    port: int = 8000
    temporal_port: int = 7233
    ui_port: int = 8233
    log_level: str = "info"
    # Whether commits wait for the disk.
    durable: bool = False
    # Whether changed code is loaded.
    reload: bool = True

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.ui_port}"


def run(options: DevOptions, say: Callable[[str], None]) -> None:
    """Run everything until SIGINT or SIGTERM; `PerdureError` when it cannot start."""
    # Report wrong declarations before any process starts.
    check_level(options.log_level)
    settings = Settings()
    agents = load_agents(options.agents or settings.agents, settings.model, settings.turns)
    runs = load_runs(settings.runs, options.agents or settings.agents).names
    # The same condition as `is_development` of the API.
    keyed = bool(settings.api_keys or settings.jwt_issuer) and not settings.trust_loopback
    references = f"{options.agents or settings.agents},{settings.runs}"
    roots = source_roots(references) if options.reload else ()
    console = settings.console == "on"
    asyncio.run(Dev(options, say, agents, runs=runs, keyed=keyed, roots=roots, console=console).run())


def kill(data_dir: Path, part: str) -> str:
    """`kill -9` the worker or the API of the `perdure dev` that uses this folder. The result names the process."""
    if part not in _KILLABLE:
        raise Invalid(f"Choose one of {' and '.join(_KILLABLE)} to kill.")
    content = read_flag(data_dir / f"{part}.ready")
    if content is None or not is_owned(data_dir):
        raise Occupied(f"No `perdure dev` runs on {data_dir.absolute()}, or its {part} is not ready; see --data-dir.")
    try:
        os.kill(int(content), signal.SIGKILL)
    except ProcessLookupError:
        raise Occupied(f"The {part} is dead already, and is being started again.") from None
    return f"Killed the {part}, process {content}."


class Dev:
    """One run of `perdure dev`."""

    def __init__(
        self,
        options: DevOptions,
        say: Callable[[str], None],
        agents: AgentRegistry,
        *,
        runs: Sequence[str] = (),
        keyed: bool = False,
        roots: Sequence[Path] = (),
        console: bool = True,
    ) -> None:
        """`roots`: the folders whose changes are loaded."""
        self._options = options
        self._console = console
        self._roots = roots
        # The header for the examples of `curl` when the API requires a key.
        self._key = " -H 'authorization: Bearer YOUR_KEY'" if keyed else ""
        self._say = say
        self._agents = agents
        self._runs = runs
        self._data = options.data_dir.absolute()
        database = self._data / "temporal.db"
        self._server = DevServer(database, options.temporal_port, options.ui_port, durable=options.durable)
        self._supervisor = Supervisor(self._data / "logs", say)

    async def run(self) -> None:
        with locked(self._data):
            work = asyncio.create_task(self._work())

            def interrupt() -> None:
                # A second signal kills the processes.
                if not work.cancel():
                    self._supervisor.kill()

            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, interrupt)
            try:
                await work
            except asyncio.CancelledError:
                self._say("Stopping.")
            finally:
                await self._supervisor.stop()

    async def _work(self) -> None:
        options, server = self._options, self._server
        # The files may be of an earlier run on other ports.
        (self._data / ADDRESS).unlink(missing_ok=True)
        (self._data / API).unlink(missing_ok=True)
        await _free(options.host, options.port, "--port")
        await _free("127.0.0.1", options.temporal_port, "--temporal-port")
        await _free("127.0.0.1", options.ui_port, "--ui-port")
        await self._supervisor.start(
            Part("temporal", server.command(), lambda _: server.ready(), shown=False, private=True, patience=5.0),
            Part("migration", command("migrate"), None, self._environment()),
        )
        write_temporal_address(Settings(data_dir=self._data), server.address)
        write_api_url(self._data, options.url)
        # Looked at before anything is loaded: a change from now on is noticed.
        sources = Sources(self._roots, self._data)
        before = await asyncio.to_thread(sources.look)
        await self._supervisor.start(self._part("worker"), self._part("api"))
        self._say(self._welcome())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.keep())
            if self._roots:
                group.create_task(Reload(sources, self._supervisor, self._environment(), self._say).run(before))

    def _part(self, name: str) -> Part:
        flag = self._data / f"{name}.ready"
        overlaps = name == "worker"
        return Part(
            name,
            command(name, "--ready-file", str(flag)),
            lambda pid: _pid_written(flag, pid),
            self._environment(),
            # A worker has ten seconds to end its work.
            patience=15.0 if overlaps else 10.0,
            overlaps=overlaps,
            flag=flag,
        )

    def _environment(self) -> dict[str, str | None]:
        options = self._options
        return {
            "PERDURE_DATA_DIR": str(self._data),
            "PERDURE_TEMPORAL_ADDRESS": self._server.address,
            "PERDURE_TEMPORAL_UI_URL": options.ui_url,
            # The dev server has one namespace and needs no key, whatever the environment says about a cloud.
            "PERDURE_TEMPORAL_NAMESPACE": "default",
            "PERDURE_TEMPORAL_TLS": None,
            "PERDURE_TEMPORAL_API_KEY": None,
            **({"PERDURE_AGENTS": options.agents} if options.agents else {}),
            "PERDURE_HOST": options.host,
            "PERDURE_PORT": str(options.port),
            "PERDURE_LOG_LEVEL": options.log_level,
            **({"PERDURE_DURABLE": "true"} if options.durable else {}),
            # One worker serves everything here.
            "PERDURE_POOLS": ALL_POOLS,
            "PYTHONUNBUFFERED": "1",
        }

    def _welcome(self) -> str:
        url, key = self._options.url, self._key
        chat = "perdure chat" + ("" if url == _DEFAULT_URL else f" --url {url}") + (" --key YOUR_KEY" if key else "")
        console = f"  console      {url}/\n" if self._console else ""
        return f"""
Perdure is ready.

{console}  API          {url}
  Temporal UI  {self._options.ui_url}
  data, logs   {self._data}
  worker       process {read_flag(self._data / "worker.ready")}; `perdure dev --kill worker` kills it, and it comes back

{listed(self._agents, self._runs)}

Talk to it in another terminal{" or in the console" if console else ""}:

  {chat}

Or with curl (put the sessionId of the first answer into the second line):

  curl -s {url}/eve/v1/session{key} -H 'content-type: application/json' -d '{{"message": "hello"}}'
  curl -sN {url}/eve/v1/session/SESSION_ID/stream{key}

Ctrl-C ends everything; the sessions are here again at the next start.
"""


def listed(agents: AgentRegistry, runs: Sequence[str] = ()) -> str:
    """The lines about the agents and the runs in the welcome text."""
    lines = [f"  {'agent' if agents.is_public(agent.name) else 'subagent':<12} {_described(agent)}" for agent in agents]
    return "\n".join([*lines, *(f"  {'run':<12} {name} (POST /workflows/{name})" for name in runs)])


def _described(agent: Agent) -> str:
    tools = [*(name for tool in agent.tools for name in _names(tool)), *(name for name, _ in agent.children)]
    return f"{agent.name} (model {agent.model or DEMO}): {', '.join(tools) or 'no tools'}"


def _names(tool: object) -> list[str]:
    """The names of a toolset's tools if it has them locally, else its own name: a server would need a request."""
    known: object = getattr(tool, "tools", None)
    if isinstance(known, Mapping):
        return [str(name) for name in cast("Mapping[object, object]", known)]
    return [str(getattr(tool, "name", None) or type(tool).__name__)]


@contextlib.contextmanager
def locked(data_dir: Path) -> Generator[None]:
    """Lock the data directory. The kernel releases the lock when the process ends."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(
                f"Another `perdure dev` runs on {data_dir}; give this one a --data-dir of its own."
            ) from None
        # An older build left these files open to other users.
        if (logs := data_dir / "logs").is_dir():
            close_folder(logs, _LOGS)
        close_folder(data_dir, _FILES)
        yield
    finally:
        os.close(descriptor)


async def _free(host: str, port: int, option: str) -> None:
    """Wait a short time until the port is free; `Occupied` when it is not."""
    for _ in range(int(_PORT_PATIENCE / 0.05)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # The servers set this too. Without it, recently closed connections keep the port busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return
        await asyncio.sleep(0.05)
    raise Occupied(f"Port {port} is taken; choose another one with {option}.")


async def _pid_written(flag: Path, pid: int) -> None:
    """Wait until the process has written its id to its ready file."""
    while read_flag(flag) != str(pid):
        await asyncio.sleep(0.02)
