"""Keeps the processes of one machine alive, stops them together, and lets none outlive the one that started it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.errors import PerdureError
from perdure.telemetry.logs import BoundedLog, Notices

_PR_SET_PDEATHSIG = 1
_ANY_PROGRAM = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")
# Loaded before any fork, because little is safe between fork and exec.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` that makes the kernel kill the child when this process ends (Linux only)."""
    parent = os.getpid()

    def set_signal() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent ended before the call above.
            os._exit(1)

    return set_signal


def kill_group(pid: int) -> None:
    """Kill the rest of the process group of `pid`, such as processes that a dead worker's tools started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def bare_environment() -> dict[str, str]:
    """A minimal environment for foreign programs: ours contains keys."""
    return {name: os.environ[name] for name in _ANY_PROGRAM if name in os.environ}


async def stop(process: asyncio.subprocess.Process, patience: float) -> None:
    """Send SIGTERM, wait up to `patience` seconds, then kill the process and its group."""
    try:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
    finally:
        kill_group(process.pid)
    await process.wait()


def command(part: str, *options: str) -> list[str]:
    """The command line of one of our own parts, with this Python interpreter."""
    return [sys.executable, "-m", "perdure", part, *options]


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


#: Pauses before the restarts of a crashed part; the first restart is immediate.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
# After so many seconds without a crash the pauses start again from the first.
_STEADY = 30.0
#: Seconds within which a process with new code must be ready.
_REPLACEMENT = 60.0
#: Processes of a part that end their work at once. What is older is killed.
_RETIRING = 2


class PartFailed(PerdureError):
    """A part did not start."""

    code = "part_failed"


@dataclass(frozen=True)
class Part:
    """A program to keep running. `ready` returns when the process with this id is ready.

    Without `ready` the program runs once and is not restarted; it must exit with code 0.
    """

    name: str
    command: Sequence[str]
    ready: Callable[[int], Awaitable[None]] | None
    # Added to our environment; None removes a variable.
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    # Whether its warnings and errors are shown. Its log file has all output.
    shown: bool = True
    # A foreign program: it gets none of our keys, and its files are not readable for other users.
    private: bool = False
    patience: float = 10.0
    # Whether a process with new code may start while the old one still ends its work. Otherwise that is stopped first.
    overlaps: bool = False
    # The file into which the process that is ready writes its id.
    flag: Path | None = None


class Supervisor:
    """Starts parts in stages and stops the stages in reverse order."""

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        self._logs = logs
        self._say = say
        self._stages: list[list[Keeper]] = []

    async def start(self, *parts: Part) -> None:
        """Start these parts together and wait until all are ready; `PartFailed` when one fails."""
        keepers = [Keeper(part, self._logs, self._say) for part in parts]
        self._stages.append(keepers)
        try:
            async with asyncio.TaskGroup() as group:
                for keeper in keepers:
                    group.create_task(keeper.start())
        except* PerdureError as failures:
            raise failures.exceptions[0] from None

    async def keep(self) -> None:
        """Restart parts that crash, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers():
                group.create_task(keeper.keep())

    async def replace(self, name: str) -> None:
        """Start this part anew, with the code that is there now; `PartFailed` when it does not start."""
        for keeper in self._keepers():
            if keeper.name == name:
                await keeper.replace()

    async def stop(self) -> None:
        """Stop all parts, the last stage first, because a stage depends on the earlier ones."""
        for stage in reversed(self._stages):
            await asyncio.gather(*(keeper.stop() for keeper in stage))
        self._stages.clear()

    def kill(self) -> None:
        """Kill all parts at once."""
        for keeper in self._keepers():
            keeper.kill()

    def _keepers(self) -> list["Keeper"]:
        return [keeper for stage in self._stages for keeper in stage]


class Keeper:
    """One part: its current process, those that it has replaced and that still end their work, and its log."""

    def __init__(self, part: Part, logs: Path, say: Callable[[str], None]) -> None:
        self.name = part.name
        self._part = part
        self._path = logs / f"{part.name}.log"
        self._log = BoundedLog(self._path)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._former: dict[asyncio.subprocess.Process, asyncio.Task[None] | None] = {}
        self._drains: list[asyncio.Task[None]] = []
        self._notices = Notices()
        # Held while a process takes the place of another one.
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Run the part; `PartFailed` when it ends before it is ready."""
        process = await self._spawn()
        if self._part.ready is None:
            if await process.wait():
                raise PartFailed(await self._last_words(process))
            return
        ready = asyncio.ensure_future(self._part.ready(process.pid))
        gone = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise PartFailed(await self._last_words(process))
            await ready
        finally:
            ready.cancel()
            gone.cancel()

    async def keep(self) -> None:
        """Restart the part whenever it ends."""
        crashes = 0
        while self._part.ready is not None:
            process = self._process
            assert process is not None, "a part is started before it is kept"
            since = asyncio.get_running_loop().time()
            how = ended(await process.wait())
            async with self._changing:
                if process is not self._process:
                    # It was replaced.
                    continue
                kill_group(process.pid)
                steady = asyncio.get_running_loop().time() - since > _STEADY
                crashes = 0 if steady else crashes
                self._say(f"The {self._part.name} {how}; starting it again.")
                await asyncio.sleep(_PAUSES[min(crashes, len(_PAUSES) - 1)])
                crashes += 1
                try:
                    await self.start()
                except PerdureError as failure:
                    self._say(failure.message)
                    continue
                except OSError as error:
                    # Python is being installed anew, or there are no more processes: that may pass, and others run on.
                    self._say(f"The {self._part.name} could not be started: {error}.")
                    continue
                self._say(f"The {self._part.name} is back.")

    async def replace(self) -> None:
        """Run the part in a new process. `PartFailed` when that does not start; one that overlaps then stays."""
        if self._changing.locked() and self._process is not None:
            # A restart after a crash may hang in the code that was there before.
            kill_group(self._process.pid)
        async with self._changing:
            old = self._process
            assert old is not None, "a part is started before it is replaced"
            self._former[old] = None
            if not self._part.overlaps:
                await stop(old, self._part.patience)
                del self._former[old]
            try:
                async with asyncio.timeout(_REPLACEMENT):
                    await self.start()
            except (PerdureError, OSError) as failure:
                await self._keep_old(old)
                if not isinstance(failure, TimeoutError):
                    raise
                raise PartFailed(f"The {self._part.name} was not ready within {_REPLACEMENT:g} s.") from None
            if self._part.overlaps:
                self._former[old] = asyncio.create_task(self._retire(old))
        for oldest in list(self._former)[:-_RETIRING]:
            kill_group(oldest.pid)

    async def _keep_old(self, old: asyncio.subprocess.Process) -> None:
        """End what did not start in the place of this process, which goes on if it overlaps."""
        failed = self._process
        if failed is not None and failed is not old:
            kill_group(failed.pid)
            await failed.wait()
        if self._part.overlaps:
            self._process = old
            del self._former[old]
            if self._part.flag is not None and old.returncode is None:
                # Each process takes the file away when it starts.
                self._part.flag.write_text(str(old.pid))

    async def stop(self) -> None:
        """Stop all of its processes and write the rest of their output."""
        processes = [*self._former, *([] if self._process is None else [self._process])]
        await asyncio.gather(*(stop(each, self._part.patience) for each in processes))
        await asyncio.gather(*(task for task in self._former.values() if task))
        await self._drained(self._drains)
        self._log.close()

    def kill(self) -> None:
        for process in [*self._former, *([] if self._process is None else [self._process])]:
            kill_group(process.pid)

    async def _retire(self, process: asyncio.subprocess.Process) -> None:
        """Let a process that was replaced end its work."""
        await stop(process, self._part.patience)
        self._former.pop(process, None)

    async def _spawn(self) -> asyncio.subprocess.Process:
        ours = bare_environment() if self._part.private else dict(os.environ)
        environment = {**ours, **self._part.environment}
        # Not asyncio's pipe: with it, `wait` does not return while a child of the dead process holds the pipe.
        source, sink = os.pipe()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._part.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={name: value for name, value in environment.items() if value is not None},
                umask=0o077 if self._part.private else -1,
                # Only the supervisor gets Ctrl-C; it stops the parts in order.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        finally:
            os.close(sink)
            self._notices = Notices()
            self._drains = [each for each in self._drains if not each.done()]
            self._drains.append(asyncio.create_task(self._read(source, self._notices)))
        return process

    async def _read(self, pipe: int, notices: Notices) -> None:
        """Read the output: a process blocks when its pipe is full."""
        output = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(pipe, "rb"))
        with contextlib.closing(transport):
            while chunk := await output.read(65_536):
                self._log.write(chunk)
                for line in notices.feed(chunk):
                    if self._part.shown:
                        self._say(f"{self._part.name} | {line}")

    async def _drained(self, drains: Sequence[asyncio.Task[None]]) -> None:
        """Wait a short time for the end of the output: a process that left the group may keep the pipe open."""
        if drains:
            await asyncio.wait(drains, timeout=1.0)
            for drain in drains:
                drain.cancel()

    async def _last_words(self, process: asyncio.subprocess.Process) -> str:
        how = ended(process.returncode or 0)
        kill_group(process.pid)
        # Those of older processes go on.
        await self._drained(self._drains[-1:])
        reason = self._notices.last.removeprefix("perdure: ") or f"it {how}"
        return f"The {self._part.name} did not start: {reason} (see {self._path})"
