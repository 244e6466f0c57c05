"""Starts our processes by forking one that has imported everything already.

Importing the product costs more than half a second of a processor, and a run of the tests starts hundreds of
processes. What is forked is a process of its own in every other respect: group, output, environment, signals.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from perdure.dev.supervisor import die_with_parent

#: What most of our processes import, or take long to.
_MODULES = (
    "perdure.cli.commands",
    "perdure.cli.serve",
    "worker",
    "api.app",
    "perdure.harness.compaction",
    "perdure.models.provider",
    "perdure.store.postgres",
    "perdure.store.sqlite",
    "psycopg",
    "psycopg_pool",
    "pydantic_ai.models.openai",
    "pydantic_ai.providers.openai",
    "uvicorn",
    "uvloop",
)

# A request is one packet: the environment is the largest part of it.
_PACKET = 200_000


class Child(Protocol):
    """What tests need of a process: a part of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class ForkServer:
    """The process that forks. Start it on the main thread: the kernel kills it, and what it forked, after that."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._folder = os.getcwd()
        self._python = _of_python(os.environ)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent(),
            )

    def can_start(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork is like a new Python here: it runs a module of ours, and Python itself is set up the same."""
        module = command[2] if list(command[:2]) == [sys.executable, "-m"] else ""
        return (
            module.partition(".")[0] in ("perdure", "tests")
            and os.getcwd() == self._folder
            and _of_python(environment) == self._python
        )

    def start(self, command: Sequence[str], output: int, environment: Mapping[str, str]) -> "Forked":
        """Fork a process for `python -m module …`, with its output in a file."""
        request = json.dumps({"words": command[2:], "environment": dict(environment)}).encode()
        assert len(request) < _PACKET
        return Forked(self._request(request, [output]), self)

    def exit_code(self, pid: int) -> int:
        """Forget a process that has ended, and say how it did, in the numbers of `subprocess`."""
        return self._request(json.dumps({"ended": pid}).encode(), [])

    def _request(self, request: bytes, files: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [request], files)
            answer = self._socket.recv(_PACKET)
        assert answer, "the fork server has ended"
        return int(answer)


class Forked:
    """A process that the fork server has started; the process id is its own until its exit code has been read."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server
        self._file = os.pidfd_open(pid)
        self._exit_code: int | None = None
        # The server forgets a process once it was asked for its exit code.
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        return self._exit_code if self._ended_within(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended_within(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._file, sig)

    def __del__(self) -> None:
        os.close(self._file)

    def _ended_within(self, seconds: float | None) -> bool:
        if self._exit_code is None:
            poll = select.poll()
            # Readable as soon as the process has ended.
            poll.register(self._file, select.POLLIN)
            if not poll.poll(None if seconds is None else seconds * 1000):
                return False
            with self._asking:
                if self._exit_code is None:
                    self._exit_code = self._server.exit_code(self.pid)
        return True


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    """What Python itself reads when it starts. All are unbuffered here, which nobody minds."""
    return {
        name: value for name, value in environment.items() if name.startswith("PYTHON") and name != "PYTHONUNBUFFERED"
    }


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request, until nobody asks any more. In a forked process it returns what to run."""
    set_death_signal = die_with_parent()
    while True:
        packet, files, _, _ = socket.recv_fds(requests, _PACKET, 1)
        if not packet:
            sys.exit()
        request = json.loads(packet)
        if pid := request.get("ended"):
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            is_ready, tell_ready = os.pipe()
            answer = os.fork()
            if not answer:
                os.setsid()
                set_death_signal()
                os.dup2(files[0], 1)
                os.dup2(files[0], 2)
                os.environ.clear()
                os.environ.update(request["environment"])
                # Whoever started it may signal its group from now on.
                for file in (files[0], requests.detach(), is_ready, tell_ready):
                    os.close(file)
                return request["words"]
            for file in (*files, tell_ready):
                os.close(file)
            os.read(is_ready, 1)
            os.close(is_ready)
        requests.send(str(answer).encode())


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in _MODULES:
        importlib.import_module(module)
    # A thread would not exist in what is forked, but its locks would.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    # What exists now is never garbage: looking for it would copy all memory in each process.
    gc.collect()
    gc.freeze()
    module, *arguments = _serve(requests)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
