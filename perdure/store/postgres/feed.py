"""News between processes that share one PostgreSQL database: LISTEN/NOTIFY, and a slow look for what it may lose.

The notice is sent after the commit and not inside it: a transaction that notifies holds a lock of the whole database
until it is on disk, which would make all sessions commit one after another. A process that dies between the two loses
the notice; the look of every listener finds the events all the same.
"""

import asyncio
import logging

import psycopg

from perdure.errors import Unavailable
from perdure.store.engine.database import heads
from perdure.store.watchers import Audience

from .database import KEEPALIVE, PostgresDatabase

log = logging.getLogger(__name__)

#: Seconds between two looks.
LOOK = 2.0
RETRY = (0.1, 0.5, 2.0)


class Notifications:
    """One connection that listens while somebody watches; one task that notifies while there is something to say."""

    def __init__(self, url: str, database: PostgresDatabase, look: float = LOOK) -> None:
        self._url = url
        self._database = database
        self._look = look
        self._unsaid: dict[str, int] = {}
        self._saying: asyncio.Task[None] | None = None

    async def follow(self, audience: Audience) -> None:
        failures = 0
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._url, autocommit=True, **KEEPALIVE) as connection:
                    await connection.execute("LISTEN perdure_events")
                    # For all that was said while nobody listened.
                    audience.stir()
                    failures = 0
                    await self._listen(connection, audience)
            except (psycopg.OperationalError, Unavailable) as error:
                log.warning("lost the news from PostgreSQL, connecting again: %s", error)
                await asyncio.sleep(RETRY[min(failures, len(RETRY) - 1)])
                failures += 1

    async def _listen(self, connection: psycopg.AsyncConnection, audience: Audience) -> None:
        while True:
            async for notice in connection.notifies(timeout=self._look):
                head, _, session_id = notice.payload.partition(" ")
                audience.told(session_id, int(head))
            audience.compare(await heads(self._database, audience.sessions()))

    def announce(self, session_id: str, head: int) -> None:
        # Sessions that move while a notice is under way share the next one.
        self._unsaid[session_id] = head
        if self._saying is None:
            self._saying = asyncio.create_task(self._say(), name="perdure-store-notify")

    async def close(self) -> None:
        if self._saying is not None:
            await self._saying

    async def _say(self) -> None:
        try:
            while self._unsaid:
                payloads = [f"{head} {session_id}" for session_id, head in self._unsaid.items()]
                self._unsaid = {}
                await self._notify(payloads)
        finally:
            self._saying = None

    async def _notify(self, payloads: list[str]) -> None:
        try:
            await self._database.read(lambda tx: tx.run("notify", payloads=payloads))
        except Unavailable as error:
            # The commits stand, and every listener's next look finds them.
            log.warning("could not tell other processes about %d sessions: %s", len(payloads), error)
