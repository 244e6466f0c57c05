"""Processes of a test: leashed to it, their output in files."""

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perdure.dev.supervisor import die_with_parent, kill_group
from tests.support.forkserver import Child, ForkServer

_TAIL = 6_000

#: How long the tests wait for what must come. Only a failure ever waits that long, and the machine may be busy.
PATIENCE = 60.0

# Below those that the kernel hands to outgoing connections, one of which may hold a port before it is bound.
_PORTS = range(10_000, 30_000)
#: Processes of one run that never choose the same port.
_SHARES = 16
_given: set[int] = set()
# Not the one that a property test seeds: that gives the same ports to all.
_dice = random.SystemRandom()


class Process:
    """A child in a process group of its own. Start it on the main thread: the kernel kills it when that thread ends."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            server = _fork_server()
            if server and server.can_start(command, environment):
                self._child: Child = server.start(command, output.fileno(), environment)
            else:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def output(self) -> str:
        """The end of what it said."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does; the children of its tools live on."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()

    def stop(self) -> None:
        """Freeze it, and wait until none of its threads runs: on a busy machine they may run on for a while."""
        self._child.send_signal(signal.SIGSTOP)
        if sys.platform == "linux":
            wait_until(lambda: set(_states(self.pid)) <= {"T", "t", "Z"}, f"{self.name} to freeze")

    def cont(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def terminate(self, within: float = PATIENCE) -> int:
        """Ask it to end, and say how it did."""
        self._child.send_signal(signal.SIGTERM)
        return self._child.wait(within)

    def wait(self, within: float = PATIENCE) -> int:
        return self._child.wait(within)

    def close(self) -> None:
        """Leave nothing of it and of its group."""
        kill_group(self.pid)
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()


@functools.cache
def _fork_server() -> ForkServer | None:
    """Tests fork most of their processes; the chaos that runs for itself starts each from nothing, as a user does."""
    return ForkServer() if "PYTEST_VERSION" in os.environ and sys.platform == "linux" else None


def wait_until(condition: Callable[[], bool], what: str, within: float = PATIENCE) -> None:
    """Wait for a condition; what was waited for is the error."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within:g} s for {what}")
        time.sleep(0.02)


def _states(pid: int) -> list[str]:
    """The state of each thread of a process, as the kernel abbreviates it."""
    states: list[str] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def free_port() -> int:
    """A free port, which no other test of this run is given before it is used."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    ports = _PORTS[int(worker.removeprefix("gw") or -1) % _SHARES :: _SHARES]
    while True:
        port = _dice.choice(ports)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


_GIVEN = ("PERDURE_TEMPORAL_BIN", "PERDURE_TURNS", "PERDURE_SANDBOX")


def clean_environment() -> dict[str, str]:
    """Ours, without what would change how Perdure behaves or let a test spend money.

    `PERDURE_TURNS=inline pytest …` runs the same tests with inline turns.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_") or name in _GIVEN}
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        ours.pop(name, None)
    return ours
