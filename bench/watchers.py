"""Readers of one stream in a process of their own: `python -m bench.watchers PORT PATH COUNT`.

So many read it as server-sent events, and as many by long-poll, each on a connection of its own.
Standard input says how many events the stream has; standard output when each reader has read so many.
"""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from .http import Connection
from .rows.watched import READY

_NEXT = re.compile(rb'"streamNextOffset":"\d+_(\d+)"')


async def main(port: int, path: str, count: int) -> None:
    kinds = (_pushed, _polled)
    readers = [kind(await Connection.open(port), path) for kind in kinds for _ in range(count)]
    places = [await anext(reader) for reader in readers]
    read = asyncio.Condition()

    async def follow(number: int) -> None:
        async for place in readers[number]:
            places[number] = place
            async with read:
                read.notify_all()

    following = [asyncio.create_task(follow(number)) for number in range(len(readers))]
    _say(READY)
    while line := await asyncio.to_thread(sys.stdin.readline):
        async with read:
            await read.wait_for(partial(_all_have, places, int(line)))
        _say(READY)
    for each in following:
        each.cancel()


async def _pushed(connection: Connection, path: str) -> AsyncGenerator[int]:
    """How far it has read."""
    async for chunk in connection.chunks(f"{path}?offset=now&live=sse"):
        for found in _NEXT.finditer(chunk):
            yield int(found[1])


async def _polled(connection: Connection, path: str) -> AsyncGenerator[int]:
    headers = (await connection.get(f"{path}?offset=now")).headers
    while True:
        offset = headers["stream-next-offset"]
        yield int(offset.rpartition("_")[2])
        place = f"offset={offset}&cursor={headers.get('stream-cursor', '0')}"
        headers = (await connection.get(f"{path}?live=long-poll&{place}")).headers


def _all_have(places: Sequence[int], events: int) -> bool:
    return min(places) >= events


def _say(words: bytes) -> None:
    sys.stdout.buffer.write(words + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
