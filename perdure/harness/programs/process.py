"""The processes that programs run in: one for each stage, forked from one that has the interpreter."""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast
from weakref import WeakKeyDictionary

from . import sandbox
from .sandbox import Answer, Request

#: Seconds for one stage on a busy machine. The process limits its own CPU time and memory.
_TIMEOUT = 60.0
#: The process that forks one for each stage: seconds in which it must have done so, and seconds after the last one.
_ANSWERS = 15.0
_IDLE = 60.0
#: Programs that compute at the same time in one worker. They wait for calls outside of it.
_MOST_AT_ONCE = max(4, os.cpu_count() or 1)
#: What the process needs of the worker's environment, to find the interpreter.
_ENVIRONMENT = ["PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "MONTY_BIN", "SYSTEMROOT"]
_places: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Places]" = WeakKeyDictionary()


class _Places:
    """Where programs compute. Families that wait get the next free place in turns, each for one program."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, family: str) -> AsyncGenerator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._called(family)
        try:
            yield
        finally:
            self._leave()

    async def _called(self, family: str) -> None:
        call = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(family, deque()).append(call)
        try:
            await call
        except asyncio.CancelledError:
            if call.done() and not call.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            family = next(iter(self._waiting))
            calls = self._waiting.pop(family)
            call = calls.popleft()
            if calls:
                # Behind all others.
                self._waiting[family] = calls
            if not call.done():
                call.set_result(None)
                return
        self._free += 1


class Forker:
    """The process that forks one for each stage.

    It starts with the first stage, and ends when there was none for a while, or when this process has ended.
    """

    def __init__(self, idle: float = _IDLE) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._environment: dict[str, str] = {}
        self._socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, connection: socket.socket) -> int | None:
        """The id, and group, of a new process that serves this connection; None if none can be started."""
        with self._lock:
            for _ in range(2):
                try:
                    return self._fork(connection)
                except OSError:
                    # It has ended meanwhile, or does not answer.
                    self.close()
        return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _fork(self, connection: socket.socket) -> int:
        # Secrets are not for programs, even for one that could break out of the interpreter.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        if environment != self._environment:
            self.close()
        requests = self._socket or self._start(environment)
        socket.send_fds(requests, [b"."], [connection.fileno()])
        pid = requests.recv(4)
        if len(pid) != 4:
            raise ConnectionError
        return int.from_bytes(pid, "big")

    def _start(self, environment: dict[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.settimeout(_ANSWERS)
            self._socket, self._environment = ours, environment
            self.process = subprocess.Popen(
                # -P: modules in Perdure's directory must not hide those of the standard library.
                [sys.executable, "-P", sandbox.__file__, str(self._idle)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the worker, which ends its programs itself.
                start_new_session=True,
                env=environment,
            )
        atexit.unregister(self.close)
        atexit.register(self.close)
        return ours


_forker = Forker()


async def run_in_process(request: Request, family: str) -> Answer:
    """The answer of the process; without content if it could not be started."""
    places = _places.setdefault(asyncio.get_running_loop(), _Places(_MOST_AT_ONCE))
    # In a thread: the results of many calls are large.
    encoded = await asyncio.to_thread(lambda: json.dumps(request).encode())
    async with places.place(family):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = await asyncio.to_thread(_forker.fork, theirs)
            theirs.close()
            if pid is None:
                return {}
            try:
                async with asyncio.timeout(_TIMEOUT):
                    output = await _exchange(ours, encoded)
            except TimeoutError:
                return {"error": sandbox.NO_MEMORY}
            finally:
                # With its own child, the interpreter.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
    try:
        return cast(Answer, await asyncio.to_thread(json.loads, output))
    except ValueError:
        # It was killed at one of its limits, and has written nothing, or a part.
        return {"error": sandbox.NO_MEMORY}


async def _exchange(connection: socket.socket, request: bytes) -> bytes:
    """All that comes back; less if the other side ends before it has read the request."""
    reader, writer = await asyncio.open_connection(sock=connection)
    output = b""
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            writer.write_eof()
            output = await reader.read()
    finally:
        # What was not sent is for nobody any more.
        writer.transport.abort()
    return output
