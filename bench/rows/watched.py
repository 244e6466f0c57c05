"""Row 13: what readers cost those who post, and how fast a long log is read."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench import consumption
from bench.http import Connection
from bench.plan import Plan
from bench.stack import Product
from bench.stats import median
from bench.table import Line, Target
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import NewEvent
from perdure.store.open import open_store
from perdure.store.values import Commit, NewSession, SessionChange

NAME = "readers"

#: An agent under a name, whose stream has both kinds of readers.
STREAM = "/agents/bench/watched"
#: What the readers print.
READY = b"ready"

_MIB = 1024 * 1024
#: Seconds between two posts.
_BREATH = 0.15
#: Events of a commit.
_AT_ONCE = 1_000
_LONG = "ses_long"


async def measure(product: Product, plan: Plan) -> list[Line]:
    async with asyncio.timeout(10 * plan.patience):
        return [*await _slowed(product, plan), *await _caught_up(product, plan)]


async def _slowed(product: Product, plan: Plan) -> list[Line]:
    """What a POST takes with readers, and without; they take turns."""
    posts = await Connection.open(product.port)
    await posts.post(STREAM, {"message": "hello"})
    newest = (await posts.get("/v1/sessions?limit=1")).json()["sessions"][0]
    session = await product.client.again(newest["sessionId"], "", turns=1)

    async def post(readers: Readers | None = None) -> Post:
        # Those who poll ask again at once when they have got something: that is over by then.
        await asyncio.sleep(_BREATH)
        begun = perf_counter()
        await posts.post(STREAM, {"message": "hello"})
        answered = perf_counter()
        await session.waiting()
        if readers is not None:
            await readers.have(session.counts.total())
        return Post(answered - begun, perf_counter() - begun)

    without, watched = list[Post](), list[Post]()
    for _ in range(plan.warmup):
        await post()
    for _ in range(plan.rounds):
        without += [await post() for _ in range(plan.turns)]
        async with reading(product.port, plan.watchers) as readers:
            watched += [await post(readers) for _ in range(plan.turns)]
    await session.close()
    posts.close()
    answered, alone = (1e3 * median([each.answered for each in some]) for some in (watched, without))
    read = 1e3 * median([each.read for each in watched])
    who = f"{plan.watchers} readers by server-sent events and {plan.watchers} by long-poll"
    return [
        Line(NAME, f"POST with {who} / without, p50", "ms", answered, alone, Target("≤", 1.2)),
        Line(NAME, "POST until all of them have read the turn, p50", "ms", read),
    ]


@dataclass(frozen=True)
class Post:
    """Seconds from before a POST until it was answered, and until all readers had the turn that it caused."""

    answered: float
    read: float


class Readers:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def have(self, events: int) -> None:
        """Wait until each of them has read so many events."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{events}\n".encode())
        await self.ready()

    async def ready(self) -> None:
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).strip() == READY


@asynccontextmanager
async def reading(port: int, count: int) -> AsyncGenerator[Readers]:
    program = [sys.executable, "-m", "bench.watchers", str(port), STREAM, str(count)]
    process = await asyncio.create_subprocess_exec(
        *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        readers = Readers(process)
        await readers.ready()
        yield readers
    finally:
        process.kill()
        await process.wait()


async def _caught_up(product: Product, plan: Plan) -> list[Line]:
    """Events per second of a log that is read from its beginning, and what the API needs in memory for that."""
    await _write(product.database, plan.logged)
    api = await Connection.open(product.port)
    before = consumption.of(product.api).rss
    seconds = dict[str, float]()
    for name, path in {
        "NDJSON": f"/eve/v1/session/{_LONG}/stream?startIndex=0&follow=false",
        "server-sent events": f"/v1/sessions/{_LONG}/events/stream",
        "transcript": f"/v1/sessions/{_LONG}/transcript?format=events",
    }.items():
        begun = perf_counter()
        size = await api.drain(path)
        seconds[name] = perf_counter() - begun
        assert size > plan.logged * 50, f"{name} was {size} bytes"
    grown = consumption.of(product.api).rss - before
    api.close()
    return [
        *(
            Line(NAME, f"events per second of a log of {plan.logged:,}, {name}", "/s", plan.logged / took)
            for name, took in seconds.items()
        ),
        Line(NAME, "resident memory of the API for that", "MiB", grown / _MIB, target=Target("≤", 32)),
    ]


async def _write(database: str, count: int) -> None:
    """A session that has ended, with so many events."""
    store = await open_store(database)
    try:
        await store.create_session(
            NewSession(_LONG, agent="bench", mode="conversation", token_hash=_LONG, principal=LOCAL)
        )
        for start in range(0, count - 1, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, count - 1))
            await store.commit(Commit(_LONG, events=[_event(number) for number in numbers]))
        ended = NewEvent(type="session.completed", key="session/completed")
        await store.commit(Commit(_LONG, events=[ended], change=SessionChange(status="completed")))
    finally:
        await store.close()


def _event(number: int) -> NewEvent:
    data: dict[str, Any] = {"message": f"The message with the number {number}.", "sequence": number, "turnId": "turn_0"}
    return NewEvent(type="message.received", key=f"message/{number}", data=data, turn=0)
