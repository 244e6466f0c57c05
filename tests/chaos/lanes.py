"""Deaths side by side: most of each is waiting for heartbeats that do not come.

Each lane has a queue, an API and workers of its own, so that only its own worker dies.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from perdure.dev.temporal_server import listens
from tests.support.chaos.world import HEARTBEAT, RECOVERY, Caller, World, undisturbed
from tests.support.processes import Process
from tests.support.waiting import until

_LANES = 6

Key = TypeVar("Key")
Story = TypeVar("Story")


@dataclass(frozen=True)
class Heir:
    """The worker that comes when another one has died."""

    process: Process
    died: float
    #: Seconds from the death until it was ready.
    started: "asyncio.Task[float]"

    async def bound(self, caller: Caller, turns: int) -> float:
        """How long what it takes over may take from the death on.

        That is what is promised, and what the machine needs in this minute to start a worker, which it does beside
        others, and for so many turns to which nothing happens.
        """
        return HEARTBEAT + RECOVERY + await self.started + turns * await undisturbed(caller)


@dataclass(frozen=True)
class Lane:
    world: World
    url: str
    queue: Mapping[str, str]

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

        return Heir(heir, died, asyncio.create_task(started()))


Play: TypeAlias = Callable[[Lane], Awaitable[Story]]


async def side_by_side(world: World, plays: Mapping[Key, Play[Story]]) -> dict[Key, Story]:
    """Play all of them, some at the same time; what became of each."""
    stories: dict[Key, Story] = {}

    async def along(number: int) -> None:
        queue = {"PERDURE_TASK_QUEUE": f"lane-{number}"}
        api = world.stack.start_api(queue, wait=False)
        url = world.stack.api_urls[-1]
        await until(lambda: listens("127.0.0.1", int(url.rpartition(":")[2])), f"{api.name} to listen")
        for key, play in list(plays.items())[number::_LANES]:
            stories[key] = await play(Lane(world, url, queue))
        api.kill()

    await asyncio.gather(*(along(number) for number in range(_LANES)))
    return stories
