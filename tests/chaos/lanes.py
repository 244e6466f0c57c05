"""Deaths side by side: most of each is waiting for heartbeats that do not come.

Each lane has a queue, an API and workers of its own, so that only its own worker dies.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from perdure.dev.temporal_server import listens
from tests.support.chaos.scripts import say
from tests.support.chaos.world import HEARTBEAT, MEASURED, RECOVERY, STICKY, Caller, World, undisturbed
from tests.support.processes import Process
from tests.support.waiting import until

_LANES = 6

#: How many turns follow on each whose worker died.
AFTERWARDS = 1 + MEASURED

Key = TypeVar("Key")
Story = TypeVar("Story")


@dataclass(frozen=True)
class Heir:
    """The worker that comes when another one has died."""

    process: Process
    died: float
    #: Seconds from the death until it was ready.
    started: "asyncio.Task[float]"
    calm: list[float]

    async def bound(self, caller: Caller, turns: int) -> float:
        """How long what it takes over may take from the death on.

        That is what is promised, what the machine needs in this minute to start a worker, which it does beside
        others, and so many turns to which nothing happens. The slowest one counts of those in all lanes: before the
        death, meanwhile and now, because the machine may have less to do now.
        """
        # Readers may have read the end before the death: this turn waits until that one has really ended.
        script = say()
        assert await caller.say(script.message) == script.answer
        self.calm.append(await undisturbed(caller))
        return HEARTBEAT + RECOVERY + STICKY + await self.started + turns * max(self.calm)


@dataclass(frozen=True)
class Lane:
    world: World
    url: str
    queue: Mapping[str, str]
    #: How many seconds turns took to which nothing happened, in any lane so far.
    calm: list[float]

    def caller(self) -> Caller:
        return Caller(self.url, self.world.receipts)

    def worker(self, environment: Mapping[str, str]) -> Process:
        return self.world.stack.start_worker({**self.queue, **environment}, wait=False)

    async def takes_over(self, doomed: Process) -> Heir:
        """Wait until it is dead, and start another one."""
        await until(lambda: not doomed.alive, f"{doomed.name} to die")
        died = time.monotonic()
        heir = self.worker({})

        async def started() -> float:
            await until(lambda: self.world.stack.serves(heir), f"{heir.name} to be ready", 120)
            return time.monotonic() - died

        return Heir(heir, died, asyncio.create_task(started()), self.calm)


Play: TypeAlias = Callable[[Lane], Awaitable[Story]]


async def side_by_side(world: World, plays: Mapping[Key, Play[Story]]) -> dict[Key, Story]:
    """Play all of them, some at the same time; what became of each."""
    stories: dict[Key, Story] = {}
    calm: list[float] = []

    async def along(number: int) -> None:
        queue = {"PERDURE_TASK_QUEUE": f"lane-{number}"}
        api = world.stack.start_api(queue, wait=False)
        url = world.stack.api_urls[-1]
        try:
            await until(lambda: listens("127.0.0.1", int(url.rpartition(":")[2])), f"{api.name} to listen")
            for key, play in list(plays.items())[number::_LANES]:
                stories[key] = await play(Lane(world, url, queue, calm))
        finally:
            # Whoever comes later would talk to it, and no worker hears that.
            api.kill()

    await asyncio.gather(*(along(number) for number in range(_LANES)))
    return stories
