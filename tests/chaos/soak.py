"""Random deaths under random talk: `python -m tests.chaos.soak --minutes 5 [--seed N] [--postgres URL]`.

Prints its seed, and what it does; ends with all invariants checked, and code 1 if one does not hold. The seed
repeats the choices; when things happen is up to the machine.
"""

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.ledger import running_ledger
from tests.support.processes import Process
from tests.support.stack import Stack

from .scripts import Script, call, drip, say
from .stubborn import Stubborn
from .world import AGENT, World, dies_at

_CLIENTS = 8
_POINTS = (
    *("model_before_begin", "model_after_begin", "model_mid_stream", "model_before_settle", "model_after_settle"),
    *("tool_before_intent", "tool_after_intent", "tool_after_effect", "tool_before_settle", "tool_after_settle"),
)


class Soak:
    """A number of clients that talk, and one hand that kills."""

    def __init__(self, world: World, directory: Path, chance: random.Random, seconds: float) -> None:
        self._world = world
        self._directory = directory
        self._chance = chance
        self._end = time.monotonic() + seconds
        self._turns = 0
        self._slowest = 0.0
        self._number = 0

    async def run(self) -> None:
        self._start_worker()
        self._start_worker()
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                group.create_task(self._talk(random.Random(self._chance.random() + number)))
            await self._kill()
        evidence = await self._world.check()
        told = f"{self._turns} turns in {len(evidence.sessions)} sessions, {self._number} workers"
        say_aloud(f"{told}, the slowest turn {self._slowest:.1f} s: all holds")

    async def _talk(self, chance: random.Random) -> None:
        client = Stubborn(self._world, chance)
        while time.monotonic() < self._end:
            if chance.random() < 0.1:
                client = Stubborn(self._world, chance)
            script = _some_script(chance)
            began = time.monotonic()
            answer = await client.say(script.message, within=180)
            self._slowest = max(self._slowest, time.monotonic() - began)
            assert answer == script.answer, f"{script.message!r} was answered with {answer!r}"
            self._turns += 1

    async def _kill(self) -> None:
        deeds: list[Callable[[], None]] = [
            self._kill_worker,
            self._kill_worker,
            self._freeze_worker,
            self._kill_api,
            self._world.stack.restart_temporal,
            self._kill_everything,
        ]
        while time.monotonic() < self._end:
            turns = self._turns + self._chance.randrange(5, 30)
            while self._turns < turns and time.monotonic() < self._end:
                # Some die by themselves, and somebody has to be there.
                if len(self._living()) < 2:
                    self._start_worker()
                await asyncio.sleep(0.05)
            deed = self._chance.choice(deeds)
            say_aloud(f"{self._turns} turns, then {deed.__name__.strip('_')}")
            deed()

    def _kill_worker(self) -> None:
        for worker in self._living()[:1]:
            worker.kill()
        self._start_worker()

    def _freeze_worker(self) -> None:
        """For as long as it takes to start another one, and to the next deed."""
        for frozen in self._living()[:1]:
            frozen.stop()
            self._start_worker()
            frozen.cont()

    def _kill_api(self) -> None:
        next(api for api in self._world.stack.apis if api.alive).kill()
        self._world.stack.start_api()

    def _kill_everything(self) -> None:
        self._world.kill_everything()
        self._world.start_everything()
        self._start_worker()

    def _living(self) -> list[Process]:
        return [worker for worker in self._world.stack.workers if worker.alive]

    def _start_worker(self) -> Process:
        """Every third one is going to die by itself, at some place and some pass."""
        self._number += 1
        doomed = self._chance.random() < 1 / 3
        point = f"{self._chance.choice(_POINTS)}:{self._chance.randrange(1, 8)}"
        once = self._directory / f"dead-{self._number}"
        return self._world.stack.start_worker(dies_at(point, once) if doomed else None)


def _some_script(chance: random.Random) -> Script:
    kinds = (say, lambda: drip(words=chance.randrange(2, 40)), *(lambda t=t: call(t) for t in _TOOLS))
    return chance.choice(kinds)()


_TOOLS = ("charge", "charge_in_thread", "put", "look")


def say_aloud(what: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--postgres", metavar="URL", help="an empty database; SQLite without it")
    asked = parser.parse_args()
    say_aloud(f"seed {asked.seed}, {asked.minutes:g} minutes")
    directory = Path(tempfile.mkdtemp(prefix="perdure-soak-"))
    with (
        running_ledger(directory) as ledger,
        Stack(
            directory,
            workers=0,
            apis=2,
            agents=AGENT,
            provider=True,
            database_url=asked.postgres,
            environment={"LEDGER_URL": ledger.url},
        ) as stack,
    ):
        soak = Soak(World(stack, ledger), directory, random.Random(asked.seed), asked.minutes * 60)
        try:
            asyncio.run(soak.run())
        except BaseException:
            say_aloud(f"seed {asked.seed} failed; what is left is in {directory}")
            raise


if __name__ == "__main__":
    main()
