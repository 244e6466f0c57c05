"""`perdure dev`: Temporal's dev server, the worker and the API, as one thing that starts and ends together."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from perdure.agents.agent import DEMO, Agent
from perdure.agents.registry import load_agents
from perdure.errors import Conflict, Invalid
from perdure.settings import Settings
from perdure.store.private import close_folder
from perdure.telemetry.logs import check_level

from .processes import command
from .supervisor import Part, Supervisor
from .temporal_server import DevServer

# How long a port may stay busy: after a `kill -9` of the one before us its children take a moment to die.
_PORT_PATIENCE = 2.0
_KILLABLE = ("worker", "api")
_ADDRESS = "temporal.ready"
#: What the data directory holds, and its folder of logs.
_FILES = ("perdure.db*", "temporal.db*", "secret", "secret.[0-9]*", "dev.lock", "*.ready", "logs")
_LOGS = ("temporal*.log", "migration*.log", "worker*.log", "api*.log")


class Occupied(Conflict):
    """Somebody else uses what we need."""

    code = "occupied"


@dataclass(frozen=True)
class DevOptions:
    """What one `perdure dev` serves, and where."""

    data_dir: Path
    agents: str | None
    host: str = "127.0.0.1"
    port: int = 8000
    temporal_port: int = 7233
    ui_port: int = 8233
    log_level: str = "info"

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.ui_port}"


def run(options: DevOptions, say: Callable[[str], None]) -> None:
    """Run everything until SIGINT or SIGTERM; `PerdureError` when it cannot start."""
    # What is declared wrongly is said before anything is started.
    check_level(options.log_level)
    settings = Settings()
    agents = load_agents(options.agents or settings.agents, settings.model)
    # As the API decides: see `is_development` there.
    keyed = bool(settings.api_keys or settings.jwt_issuer) and not settings.trust_loopback
    asyncio.run(Dev(options, say, agents, keyed=keyed).run())


def kill(data_dir: Path, part: str) -> str:
    """`kill -9` a part of the `perdure dev` that runs on this folder, and no other process; say which one it was."""
    if part not in _KILLABLE:
        raise Invalid(f"Choose one of {' and '.join(_KILLABLE)} to kill.")
    content = _content(data_dir / f"{part}.ready")
    if content is None or not _is_owned(data_dir):
        raise Occupied(f"No `perdure dev` runs on {data_dir.absolute()}, or its {part} is not ready; see --data-dir.")
    try:
        os.kill(int(content), signal.SIGKILL)
    except ProcessLookupError:
        raise Occupied(f"The {part} is dead already, and is being started again.") from None
    return f"Killed the {part}, process {content}."


def temporal_of(settings: Settings) -> str | None:
    """Where the Temporal of the `perdure dev` listens that runs on this folder with this store, if one does."""
    if not _is_owned(settings.data_dir):
        return None
    address, _, store = (_content(settings.data_dir / _ADDRESS) or "").partition("\n")
    return address if address and store == _store_of(settings) else None


def keep_temporal(settings: Settings, address: str) -> None:
    """Write down where the Temporal of this folder and this store listens."""
    (settings.data_dir / _ADDRESS).write_text(f"{address}\n{_store_of(settings)}")


def _store_of(settings: Settings) -> str:
    """Which store it is, without the password that its address may hold."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return hashlib.sha256(url.encode()).hexdigest()


def _is_owned(data_dir: Path) -> bool:
    """Whether another process owns the data directory."""
    try:
        descriptor = os.open(data_dir / "dev.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class Dev:
    """One run of `perdure dev`."""

    def __init__(
        self, options: DevOptions, say: Callable[[str], None], agents: Iterable[Agent] = (), *, keyed: bool = False
    ) -> None:
        self._options = options
        # What callers have to add, where the API asks for a key.
        self._key = " -H 'authorization: Bearer YOUR_KEY'" if keyed else ""
        self._say = say
        self._agents = tuple(agents)
        self._data = options.data_dir.absolute()
        self._supervisor = Supervisor(self._data / "logs", say)

    async def run(self) -> None:
        with owned(self._data):
            work = asyncio.create_task(self._work())
            self._on_signals(work)
            try:
                await work
            except asyncio.CancelledError:
                self._say("Stopping.")
            finally:
                await self._supervisor.stop()

    async def _work(self) -> None:
        # Of an earlier run, perhaps on another port.
        (self._data / _ADDRESS).unlink(missing_ok=True)
        await self._free_ports()
        await self._supervisor.start(self._temporal(), Part("migration", command("migrate"), None, self._environment()))
        keep_temporal(Settings(data_dir=self._data), self._server().address)
        await self._supervisor.start(self._part("worker"), self._part("api"))
        self._say(self._welcome())
        await self._supervisor.keep()

    def _temporal(self) -> Part:
        server = self._server()
        return Part("temporal", server.command(), lambda _: server.ready(), shown=False, private=True, patience=5.0)

    def _server(self) -> DevServer:
        return DevServer(self._data / "temporal.db", self._options.temporal_port, self._options.ui_port)

    def _part(self, name: str) -> Part:
        flag = self._data / f"{name}.ready"
        return Part(name, command(name, "--ready-file", str(flag)), lambda pid: _told(flag, pid), self._environment())

    def _environment(self) -> dict[str, str | None]:
        options = self._options
        return {
            "PERDURE_DATA_DIR": str(self._data),
            "PERDURE_TEMPORAL_ADDRESS": self._server().address,
            "PERDURE_TEMPORAL_UI_URL": options.ui_url,
            # Whatever cloud the environment speaks of: this is our own server.
            "PERDURE_TEMPORAL_NAMESPACE": "default",
            "PERDURE_TEMPORAL_TLS": None,
            "PERDURE_TEMPORAL_API_KEY": None,
            **({"PERDURE_AGENTS": options.agents} if options.agents else {}),
            "PERDURE_HOST": options.host,
            "PERDURE_PORT": str(options.port),
            "PERDURE_LOG_LEVEL": options.log_level,
            "PYTHONUNBUFFERED": "1",
        }

    async def _free_ports(self) -> None:
        options = self._options
        await _free(options.host, options.port, "--port")
        await _free("127.0.0.1", options.temporal_port, "--temporal-port")
        await _free("127.0.0.1", options.ui_port, "--ui-port")

    def _on_signals(self, work: "asyncio.Task[None]") -> None:
        def interrupt() -> None:
            # Whoever asks twice is in a hurry.
            if not work.cancel():
                self._supervisor.kill()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)

    def _welcome(self) -> str:
        url, key = self._options.url, self._key
        return f"""
Perdure is ready.

  API          {url}
  Temporal UI  {self._options.ui_url}
  data, logs   {self._data}
  worker       process {_content(self._data / "worker.ready")}; `perdure dev --kill worker` kills it, and it comes back
{"".join(described(agent) for agent in self._agents)}

Say hello, then watch the session that answers (put its sessionId into the second line):

  curl -s {url}/eve/v1/session{key} -H 'content-type: application/json' -d '{{"message": "hello"}}'
  curl -sN {url}/eve/v1/session/SESSION_ID/stream{key}

Ctrl-C ends everything; the sessions are here again at the next start.
"""


def described(agent: Agent) -> str:
    """The agent in a line, for whoever starts it."""
    tools = [name for tool in agent.tools for name in _names(tool)]
    return f"\n  agent        {agent.name}: {agent.model or DEMO}, {', '.join(tools) or 'no tools'}"


def _names(tool: object) -> list[str]:
    """The tools of a toolset where it knows them by itself; others are servers that would have to be asked."""
    known: object = getattr(tool, "tools", None)
    if isinstance(known, Mapping):
        return [str(name) for name in cast("Mapping[object, object]", known)]
    return [str(getattr(tool, "name", None) or type(tool).__name__)]


@contextlib.contextmanager
def owned(data_dir: Path) -> Generator[None]:
    """Own the data directory; the lock dies with the process, however that dies."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(data_dir / "dev.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(
                f"Another `perdure dev` runs on {data_dir}; give this one a --data-dir of its own."
            ) from None
        _close(data_dir)
        yield
    finally:
        os.close(descriptor)


def _close(data_dir: Path) -> None:
    """Close to everybody else what an older build has left open to them."""
    if (logs := data_dir / "logs").is_dir():
        close_folder(logs, _LOGS)
    close_folder(data_dir, _FILES)


async def _free(host: str, port: int, option: str) -> None:
    """Wait a moment for the port to be free."""
    for _ in range(int(_PORT_PATIENCE / 0.05)):
        if _bindable(host, port):
            return
        await asyncio.sleep(0.05)
    raise Occupied(f"Port {port} is taken; choose another one with {option}.")


def _bindable(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the servers do; otherwise connections that were closed a minute ago keep the port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


async def _told(flag: Path, pid: int) -> None:
    """Wait until the process with this id has written its id there."""
    while _content(flag) != str(pid):
        await asyncio.sleep(0.02)


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
