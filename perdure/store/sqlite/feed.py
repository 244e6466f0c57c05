"""News between processes that share one SQLite file: one cheap poll for all watchers, while there are any."""

import asyncio

from perdure.errors import Unavailable
from perdure.store.engine.database import heads
from perdure.store.watchers import Audience

from .database import SqliteDatabase

#: Seconds between two looks. News comes in bursts: what follows a commit soon is what somebody waits for.
EAGER = 0.002
BUSY = 0.008
QUIET = 0.02
#: Seconds since the last news after which a look is no longer eager, or no longer busy.
BURST = 0.1
SILENCE = 3.0


class ChangePoll:
    """Asks SQLite whether another process committed, and only then which sessions moved."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def follow(self, audience: Audience) -> None:
        loop = asyncio.get_running_loop()
        # No version is known yet: the first look compares in any case, for what was written before it.
        seen: int | None = None
        news_at = loop.time()
        while True:
            try:
                version = await self._database.data_version()
                if version != seen:
                    audience.compare(await heads(self._database, audience.sessions()))
                    seen, news_at = version, loop.time()
            except Unavailable:
                # Readers meet the same trouble when they read; the next look makes up for this one.
                seen = None
            await asyncio.sleep(_pause(loop.time() - news_at))

    def announce(self, session_id: str, head: int) -> None:
        """The commit itself is the announcement."""

    async def close(self) -> None: ...


def _pause(silence: float) -> float:
    """How long to wait with the next look."""
    if silence < BURST:
        return EAGER
    return BUSY if silence < SILENCE else QUIET


class Alone:
    """A database in memory: nobody else can write to it."""

    async def follow(self, audience: Audience) -> None: ...

    def announce(self, session_id: str, head: int) -> None: ...

    async def close(self) -> None: ...
