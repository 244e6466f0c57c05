"""Keeps the processes of one machine alive, and takes them down together."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.errors import PerdureError
from perdure.telemetry.logs import BoundedLog, Notices

from .processes import bare_environment, ended, kill_group, leash, stop

#: Pauses before a crashed part starts again: the first time at once.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
# Who has lived this long starts at once again.
_STEADY = 30.0


class PartFailed(PerdureError):
    """A part did not start."""

    code = "part_failed"


@dataclass(frozen=True)
class Part:
    """A program to keep alive. `ready` returns when the process with this id does its work.

    Without `ready` the program is not kept: it runs once, and has done its work when it ends well.
    """

    name: str
    command: Sequence[str]
    ready: Callable[[int], Awaitable[None]] | None
    # Laid over ours; None takes a name away.
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    # Whether its warnings and errors are shown; all of its output is in its log.
    shown: bool = True
    # A program that is not ours: it is given none of our keys, and nobody else may read its files.
    private: bool = False
    patience: float = 10.0


class Supervisor:
    """Starts parts stage by stage; when it ends, the stages end in reverse."""

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        self._logs = logs
        self._say = say
        self._stages: list[list[Keeper]] = []

    async def start(self, *parts: Part) -> None:
        """Start these parts together and wait until all are ready; `PartFailed` when one is not."""
        keepers = [Keeper(part, self._logs, self._say) for part in parts]
        self._stages.append(keepers)
        try:
            async with asyncio.TaskGroup() as group:
                for keeper in keepers:
                    group.create_task(keeper.start())
        except* PerdureError as failures:
            raise failures.exceptions[0] from None

    async def keep(self) -> None:
        """Restart whatever crashes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers():
                group.create_task(keeper.keep())

    async def stop(self) -> None:
        """End all parts, the last stage first: none has to miss what it stands on."""
        for stage in reversed(self._stages):
            await asyncio.gather(*(keeper.stop() for keeper in stage))
        self._stages.clear()

    def kill(self) -> None:
        """End all parts at once."""
        for keeper in self._keepers():
            keeper.kill()

    def _keepers(self) -> list["Keeper"]:
        return [keeper for stage in self._stages for keeper in stage]


class Keeper:
    """One part: its process of the moment, and its log."""

    def __init__(self, part: Part, logs: Path, say: Callable[[str], None]) -> None:
        self._part = part
        self._path = logs / f"{part.name}.log"
        self._log = BoundedLog(self._path)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._notices = Notices()

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
        """Start the part again whenever it ends."""
        crashes = 0
        while self._part.ready is not None:
            assert self._process is not None, "a part is started before it is kept"
            since = asyncio.get_running_loop().time()
            how = ended(await self._process.wait())
            kill_group(self._process.pid)
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
            self._say(f"The {self._part.name} is back.")

    async def stop(self) -> None:
        """End the process, and keep what it still says."""
        if self._process is not None:
            await stop(self._process, self._part.patience)
        await self._drained()
        self._log.close()

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process.pid)

    async def _spawn(self) -> asyncio.subprocess.Process:
        # Our own pipe: with one of asyncio's, a dead process counts as alive while a child of it holds the pipe.
        source, sink = os.pipe()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._part.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=_environment(self._part),
                umask=0o077 if self._part.private else -1,
                # Ctrl-C is for the supervisor only, which then ends its parts in order.
                start_new_session=True,
                preexec_fn=leash(),
            )
        finally:
            os.close(sink)
            self._drain = asyncio.create_task(self._read(source))
        return process

    async def _read(self, pipe: int) -> None:
        """Drain the output: a process whose pipe is full stands still."""
        self._notices = Notices()
        output = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(pipe, "rb"))
        with contextlib.closing(transport):
            await self._copy(output)

    async def _copy(self, output: asyncio.StreamReader) -> None:
        while chunk := await output.read(65_536):
            self._log.write(chunk)
            for line in self._notices.feed(chunk):
                if self._part.shown:
                    self._say(f"{self._part.name} | {line}")

    async def _drained(self) -> None:
        """Wait for the end of the output; somebody who left the process group may keep the pipe open for ever."""
        if self._drain is not None:
            await asyncio.wait({self._drain}, timeout=1.0)
            self._drain.cancel()

    async def _last_words(self, process: asyncio.subprocess.Process) -> str:
        how = ended(process.returncode or 0)
        kill_group(process.pid)
        await self._drained()
        reason = self._notices.last.removeprefix("perdure: ") or f"it {how}"
        return f"The {self._part.name} did not start: {reason} (see {self._path})"


def _environment(part: Part) -> dict[str, str]:
    ours = bare_environment() if part.private else dict(os.environ)
    return {name: value for name, value in {**ours, **part.environment}.items() if value is not None}
