"""The processes around a session, one step at a time.

A process (an attempt at an activity, or a request to the API) stops at gates: where it begins, at each access to the
store, and in the middle of a model call or a tool. The test lets one continue, kills it there, or takes it for dead.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar, cast

from perdure.store.base import Store

T = TypeVar("T")

#: How far a process goes when it is let go: to the next gate of this kind, or to its end.
Pace: TypeAlias = Literal["read", "write", "work", "end"]
Gate: TypeAlias = Literal["begin", "read", "write", "written", "work"]
#: What happens to a request when it is about to call Temporal.
Fate: TypeAlias = Literal["lives", "dies", "temporal is away", "answer is lost"]

_STOPS: dict[Pace, frozenset[Gate]] = {
    "read": frozenset({"begin", "read", "write", "written", "work"}),
    "write": frozenset({"begin", "write", "written", "work"}),
    "work": frozenset({"begin", "work"}),
    "end": frozenset({"begin"}),
}

_WRITES = frozenset(
    {
        "create_session",
        "cancel",
        "set_attention",
        "accept",
        "refuse",
        "mark_unsignalled",
        "clear_unsignalled",
        "answer",
        "commit",
    }
)

#: How often the loop must turn without any news before all processes are taken to wait.
_QUIET = 30


class Died(BaseException):
    """The process ends here."""


@dataclass(eq=False)
class Process:
    name: str
    fate: Fate = "lives"
    pace: Pace = "end"
    at: Gate = "begin"
    dead: bool = False
    #: Temporal takes it for dead, and it is not.
    zombie: bool = False
    #: When it wrote last, in the order of everything that happens.
    wrote: int = 0
    #: What it was asked to do.
    argument: Any = None
    #: Has it notice that it is to stop.
    notice: Callable[[], None] | None = None
    #: Called when Temporal takes it for dead.
    lost: Callable[[], None] | None = None
    waiting: "asyncio.Future[None] | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: "asyncio.Task[Any] | None" = None

    @property
    def begun(self) -> bool:
        return self.at != "begin"


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


@dataclass(eq=False)
class _Condition:
    holds: Callable[[], bool]
    context: Context
    deadline: float | None
    met: "asyncio.Future[bool]"


class _Access:
    """One access to the store, by whoever awaits its turn."""

    def __init__(self) -> None:
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class Processes:
    def __init__(self, now: Callable[[], float]) -> None:
        self.alive: list[Process] = []
        self.order = count(1)
        #: What went wrong that nothing may make go wrong.
        self.faults: list[BaseException] = []
        self._now = now
        self._conditions: list[_Condition] = []
        #: Accesses to the store that are to be made, in this order.
        self._accesses: deque[_Access] = deque()

    def start(self, name: str, work: Callable[[], Awaitable[Any]], *, fate: Fate = "lives") -> Process:
        process = Process(name, fate)

        async def live() -> Any:
            CURRENT.set(process)
            try:
                await self.gate("begin")
                return await work()
            finally:
                self.alive.remove(process)

        self.alive.append(process)
        process.task = asyncio.get_running_loop().create_task(live())
        return process

    async def gate(self, at: Gate) -> None:
        process = CURRENT.get()
        if process is None:
            return
        # What a process does side by side is done one after another here.
        async with process.lock:
            if process.dead:
                raise Died
            if at not in _STOPS[process.pace]:
                return
            process.at = at
            process.waiting = asyncio.get_running_loop().create_future()
            try:
                await process.waiting
            finally:
                process.waiting = None

    async def go(self, process: Process, pace: Pace) -> None:
        """Let one process continue, until all processes wait."""
        process.pace = pace
        self._release(process)
        await self.rest()

    async def kill(self, process: Process) -> None:
        process.dead = True
        if process.waiting is not None and not process.waiting.done():
            process.waiting.set_exception(Died())
        await self.rest()

    def die_here(self) -> None:
        """The process that runs dies."""
        process = CURRENT.get()
        assert process is not None
        process.dead = True
        raise Died

    async def rest(self) -> None:
        """Until all processes wait: at a gate, or for something that is to happen."""
        quiet = 0
        while quiet < _QUIET:
            await asyncio.sleep(0)
            quiet = 0 if self._meet_conditions() else quiet + 1
            if quiet == _QUIET and self._accesses:
                await self._make_access(self._accesses.popleft())
                quiet = 0

    async def condition(self, holds: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for it; False when it is too late."""
        waiting = _Condition(holds, copy_context(), deadline, asyncio.get_running_loop().create_future())
        self._conditions.append(waiting)
        try:
            return await waiting.met
        finally:
            self._conditions.remove(waiting)

    async def access(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work once nothing else moves: how long a store takes must not decide what happens meanwhile."""
        access = _Access()
        self._accesses.append(access)
        try:
            await access.turn
            return await work()
        finally:
            access.over.set()

    async def end(self) -> None:
        """End all of them, wherever they are, and all that wait for something."""
        for each in self._conditions:
            each.met.set_exception(Died())
        tasks = [each.task for each in self.alive if each.task is not None]
        for process in list(self.alive):
            process.dead = True
            if process.task is not None:
                process.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _release(self, process: Process) -> None:
        if process.waiting is not None and not process.waiting.done():
            process.waiting.set_result(None)

    async def _make_access(self, access: _Access) -> None:
        # Whoever asked for it may have been cancelled since.
        if not access.turn.done():
            access.turn.set_result(None)
        await access.over.wait()

    def _meet_conditions(self) -> bool:
        news = False
        for each in list(self._conditions):
            if each.met.done():
                continue
            if each.context.run(each.holds):
                each.met.set_result(True)
                news = True
            elif each.deadline is not None and each.deadline <= self._now():
                each.met.set_result(False)
                news = True
        return news


async def patiently(call: Awaitable[None]) -> None:
    """Stands for a limit of real time."""
    await call


class WatchedStore:
    """The real store, with a gate before each access and after each write; `observe` gets what was written."""

    def __init__(
        self, store: Store, processes: Processes, observe: Callable[[str, tuple[Any, ...], Any], Awaitable[None]]
    ) -> None:
        self._store = store
        self._processes = processes
        self._observe = observe

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def accessed(*args: Any, **values: Any) -> Any:
            writes = name in _WRITES
            await self._processes.gate("write" if writes else "read")
            result = await self._processes.access(lambda: self._done(name, method, args, values))
            if writes:
                await self._processes.gate("written")
            return result

        return accessed

    async def _done(self, name: str, method: Any, args: tuple[Any, ...], values: dict[str, Any]) -> Any:
        result = await method(*args, **values)
        if name in _WRITES:
            if (process := CURRENT.get()) is not None:
                process.wrote = next(self._processes.order)
            await self._observe(name, args, result)
        return result


def watched(store: WatchedStore) -> Store:
    return cast(Store, store)
