"""Readers of the event log in a process of their own: `python -m bench.readers DATABASE COUNT`.

Standard input names the sessions and how many events each will get; standard output reports each reader's delays.
"""

import asyncio
import sys
from time import perf_counter

import orjson

from perdure.store.base import Store
from perdure.store.open import open_store


async def main(database: str, count: int) -> None:
    expected: dict[str, int] = orjson.loads(await asyncio.to_thread(sys.stdin.buffer.readline))
    sessions = list(expected)
    store = await open_store(database)
    ready = asyncio.Barrier(count + 1)
    try:
        following = [
            asyncio.create_task(_follow(store, session_id, expected[session_id], ready))
            for session_id in (sessions[number % len(sessions)] for number in range(count))
        ]
        await ready.wait()
        _say(b"following\n")
        delays = [delay for reader in await asyncio.gather(*following) for delay in reader]
        _say(orjson.dumps(delays))
    finally:
        await store.close()


async def _follow(store: Store, session_id: str, expected: int, ready: asyncio.Barrier) -> list[float]:
    delays: list[float] = []
    async with store.watch(session_id) as watch:
        await ready.wait()
        while len(delays) < expected:
            await watch.changed()
            for event in await store.events(session_id, len(delays)):
                assert event.data is not None
                delays.append(perf_counter() - event.data["sentAt"])
    return delays


def _say(words: bytes) -> None:
    sys.stdout.buffer.write(words)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
