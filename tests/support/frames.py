"""A reader of server-sent events that reads on beside a test."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.talk import Talk
from tests.support.waiting import until


class Watching:
    """A reader of server-sent events: the frames so far, each with its id."""

    def __init__(self) -> None:
        self.frames: list[tuple[str | None, str, Any]] = []

    @property
    def stalls(self) -> list[Any]:
        return [data for _, event, data in self.frames if event == "session.stalled"]

    @property
    def ids(self) -> list[int]:
        return [int(id) for id, _, _ in self.frames if id is not None]

    async def read(self, caller: Talk) -> None:
        path = f"/v1/sessions/{caller.session_id}/events/stream"
        async with caller.http.stream("GET", path) as response:
            frame: dict[str, str] = {}
            async for line in response.aiter_lines():
                name, colon, value = line.partition(": ")
                if colon:
                    frame[name] = value
                elif frame.get("event"):
                    self.frames.append((frame.get("id"), frame["event"], json.loads(frame["data"])))
                    frame = {}


@asynccontextmanager
async def watching(caller: Talk) -> AsyncGenerator[Watching]:
    """A reader from the first event on, until the block ends."""
    reader = Watching()
    reading = asyncio.create_task(reader.read(caller))
    try:
        await until(lambda: reader.frames, "the stream to begin")
        yield reader
        assert not reading.done(), reading.exception()
    finally:
        reading.cancel()
