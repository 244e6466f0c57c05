"""Random failures under random talk, and a judge: `python -m tests.chaos.soak --minutes 5 [--seed N] [--postgres]`.

Callers start, fork and delete sessions and send messages, answers, controls and cancels, while processes are killed and
frozen and connections go dead. When all is well again, and nothing moves any more, what callers were promised is
checked from outside: the rows of the store, the effects in the ledger, what the provider was asked, the streams. It
prints its seed, what it does, and everything that does not hold; then its code is 1. The seed repeats the choices; when
things happen is up to the machine.
"""

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import httpx2

from tests.support.chaos.evidence import Evidence
from tests.support.chaos.scripts import say
from tests.support.chaos.world import AGENT, World
from tests.support.ledger import running_ledger
from tests.support.postgres import Cluster, find_binaries
from tests.support.stack import Stack, TemporalServer

from .callers import Callers, crowd
from .faults import Hand, Lines, log
from .promises import answers, broken_promises, slowest_delivery
from .retrying_caller import RetryingCaller

_CALLERS = 8
#: How long nothing may change, once nothing fails any more, before what has not come to rest is said to be stuck; and
#: how long it may take in all; longer by a part of a second for each that waits at first: a queue takes its time. A
#: session whose workflow cannot be replayed is started from the store after about three minutes.
_STILLNESS = 240.0
_REST = 600.0
_REST_OF_EACH = 0.5
#: How much of one kind of violation is printed.
_SHOWN = 12


class Soak:
    """Callers, a hand that breaks things, and the judgement of what became of it."""

    def __init__(self, world: World, hand: Hand, chance: random.Random, seconds: float) -> None:
        self._world = world
        self._hand = hand
        self._chance = chance
        self._seconds = seconds

    async def run(self) -> tuple[Evidence, dict[str, list[str]]]:
        self._hand.replace_the_dead()
        keeping = asyncio.create_task(self._hand.keep_alive())
        try:
            await self._begin()
            async with crowd(self._world, random.Random(self._chance.random()), self._seconds) as callers:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._hand.do_everything(self._seconds))
                    group.create_task(callers.run(_CALLERS))
                await self._hand.make_well()
                await self._rest(callers)
                evidence = await self._evidence(callers)
            return evidence, broken_promises(evidence)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _begin(self) -> None:
        """Nothing is judged before the product works at all."""
        script = say()
        answer = await RetryingCaller(self._world, self._chance).say(script.message)
        assert answer == script.answer, answer

    async def _rest(self, callers: Callers) -> None:
        """Answer what is still asked, until nothing moves any more; what is stuck is found by the judge."""
        began = changed = time.monotonic()
        before: object = None
        limit: float | None = None
        while True:
            await self._answer_everything(callers)
            await asyncio.sleep(0.5)
            moving = await asyncio.to_thread(self._world.moving)
            # What was consumed a moment ago may ask in its turn.
            waiting = [*moving.unsettled, *moving.asking]
            if moving != before:
                before, changed = moving, time.monotonic()
            limit = limit or began + _REST + _REST_OF_EACH * len(waiting)
            if not waiting or time.monotonic() > min(changed + _STILLNESS, limit):
                break
        summary = (
            f"{len(waiting)} sessions, deliveries and requests have not come to rest" if waiting else "nothing moves"
        )
        log(f"{summary} after {time.monotonic() - began:.0f} s")

    async def _answer_everything(self, callers: Callers) -> None:
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(20):
                found = await callers.any_api().get("/v1/inputs", params={"status": "open", "limit": 200})
                for each in found.json().get("inputs", []):
                    option = each["options"][0]["id"] if each["kind"] == "question" else "approve"
                    await callers.any_api().post(f"/v1/inputs/{each['requestId']}", json={"optionId": option})

    async def _evidence(self, callers: Callers) -> Evidence:
        seen = await self._world.evidence()
        observed = callers.observed
        await callers.close()
        receipts = [
            (tried.session_id, tried.delivery_id)
            for post in observed.posts
            if (tried := post.accepted) is not None and tried.delivery_id is not None
        ]
        return replace(
            seen,
            receipts=(*seen.receipts, *receipts),
            posts=observed.posts,
            cancels=observed.cancels,
            forks=observed.forks,
            deletions=observed.deletions,
            followed=observed.followed,
            absences=self._hand.absences,
        )


def judged(evidence: Evidence, broken: dict[str, list[str]], hand: Hand) -> bool:
    """Say what was seen; whether all of it holds."""
    turns = sum(event["type"] == "turn.started" for events in evidence.events.values() for event in events)
    read = sum(len(events) for _, events in evidence.followed)
    log(f"{len(hand.done)} faults, {turns} turns in {len(evidence.sessions)} sessions, {read} events read live")
    log("callers got: " + ", ".join(f"{what} {n} times" for what, n in sorted(answers(evidence).items())))
    reasons = Counter(
        event["data"]["reason"]
        for events in evidence.events.values()
        for event in events
        if event["type"] == "session.rebuilt"
    )
    log("started from the store: " + (", ".join(f"{why} {n} times" for why, n in sorted(reasons.items())) or "none"))
    seconds, name = slowest_delivery(evidence)
    log(f"the slowest delivery was consumed after {seconds:.1f} s: {name}")
    for check, wrong in broken.items():
        log(f"{check}: {len(wrong)} violations")
        for problem in wrong[:_SHOWN]:
            sys.stdout.write(f"    {problem[:600]}\n")
    log("all holds" if not broken else f"{len(broken)} promises are broken")
    return not broken


def write_down(directory: Path, evidence: Evidence, broken: dict[str, list[str]]) -> None:
    """Keep what was seen, to find out why."""
    with (directory / "evidence.json").open("w") as file:
        json.dump({"broken": broken, **asdict(evidence)}, file, default=str)


@contextlib.contextmanager
def private_cluster() -> Generator[tuple[Cluster, str]]:
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed: no initdb on the PATH or in /usr/lib/postgresql/*/bin")
    cluster = Cluster(binaries, durable=True)
    try:
        yield cluster, cluster.start()
    finally:
        cluster.stop()


def soaked(directory: Path, chance: random.Random, seconds: float, *, postgres: bool) -> bool:
    with ExitStack() as stack:
        cluster, database_url = stack.enter_context(private_cluster()) if postgres else (None, None)
        ledger = stack.enter_context(running_ledger(directory))
        temporal = TemporalServer(directory)
        stack.callback(temporal.close)
        lines = Lines(temporal, cluster, stack)
        product = stack.enter_context(
            Stack(
                directory,
                workers=0,
                apis=0,
                agents=AGENT,
                provider=True,
                database_url=database_url,
                environment={"LEDGER_URL": ledger.url, "PERDURE_LOG_LEVEL": "warning", "MAX_DEATHS": "1000"},
                temporal=temporal,
            )
        )
        world = World(product, ledger)
        stack.callback(world.close)
        hand = Hand(world, lines, cluster, directory, chance)
        evidence, broken = asyncio.run(Soak(world, hand, chance, seconds).run())
        holds = judged(evidence, broken, hand)
        if not holds:
            write_down(directory, evidence, broken)
        return holds


def _terminated(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of its own, which dies as well")
    asked = parser.parse_args()
    # A forced end of this process must not leave a database server behind.
    signal.signal(signal.SIGTERM, _terminated)
    database = "PostgreSQL" if asked.postgres else "SQLite"
    log(f"seed {asked.seed}, {asked.minutes:g} minutes, {database}")
    directory = Path(tempfile.mkdtemp(prefix="perdure-soak-"))
    try:
        holds = soaked(directory, random.Random(asked.seed), asked.minutes * 60, postgres=asked.postgres)
    except BaseException:
        log(f"seed {asked.seed} broke off; what is left is in {directory}")
        raise
    if not holds:
        log(f"seed {asked.seed} failed; what is left is in {directory}")
        sys.exit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
