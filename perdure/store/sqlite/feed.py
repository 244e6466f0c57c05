"""Notices between processes that share one SQLite file: one cheap poll for all watchers, while there are any."""

import asyncio

from perdure.errors import Unavailable
from perdure.store.engine.database import heads
from perdure.store.watchers import FeedListener

from .database import SqliteDatabase

#: Seconds between two polls. Events come in bursts, so polls are frequent after a change.
EAGER = 0.002
BUSY = 0.008
QUIET = 0.02
#: Seconds since the last change after which the interval is no longer EAGER, and no longer BUSY.
BURST = 0.1
SILENCE = 3.0


class ChangePoll:
    """Polls whether another process has committed, and only then which sessions have new events."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def follow(self, listener: FeedListener) -> None:
        loop = asyncio.get_running_loop()
        # No version is known: the first poll compares in any case, for writes before it.
        seen: int | None = None
        news_at = loop.time()
        while True:
            try:
                version = await self._database.data_version()
                if version != seen:
                    listener.compare(await heads(self._database, listener.sessions()))
                    seen, news_at = version, loop.time()
            except Unavailable:
                # Readers get the same error when they read. The next poll compares in any case.
                seen = None
            await asyncio.sleep(_pause(loop.time() - news_at))

    def announce(self, session_id: str, head: int) -> None:
        """Nothing to do: other processes poll for the commit."""

    async def close(self) -> None: ...


def _pause(silence: float) -> float:
    """Seconds until the next poll."""
    if silence < BURST:
        return EAGER
    return BUSY if silence < SILENCE else QUIET


class NoFeed:
    """The feed of a database in memory: no other process can write to it."""

    async def follow(self, listener: FeedListener) -> None: ...

    def announce(self, session_id: str, head: int) -> None: ...

    async def close(self) -> None: ...
