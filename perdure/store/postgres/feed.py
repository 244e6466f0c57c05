"""Notices between processes that share one PostgreSQL database: LISTEN/NOTIFY, and a slow poll for lost notices.

NOTIFY runs after the commit and not inside it: a transaction with NOTIFY holds a lock of the whole database until it is
on disk, so all sessions would commit one after another. A process that dies in between loses the notice; the poll of
each listener finds the events then.
"""

import asyncio
import logging

import psycopg

from perdure.errors import Unavailable
from perdure.store.engine.database import heads
from perdure.store.watchers import Watchers

from .database import KEEPALIVE, PostgresDatabase

log = logging.getLogger(__name__)

#: Seconds between two polls.
LOOK = 2.0
RETRY = (0.1, 0.5, 2.0)


class Notifications:
    """One connection that listens while there are watchers; one task that notifies while there are notices to send."""

    def __init__(self, url: str, database: PostgresDatabase, look: float = LOOK) -> None:
        self._url = url
        self._database = database
        self._look = look
        self._pending: dict[str, int] = {}
        self._sending: asyncio.Task[None] | None = None

    async def follow(self, listener: Watchers) -> None:
        failures = 0
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._url, autocommit=True, **KEEPALIVE) as connection:
                    await connection.execute("LISTEN perdure_events")
                    # Notices were lost while there was no connection.
                    listener.wake()
                    failures = 0
                    await self._listen(connection, listener)
            except (psycopg.OperationalError, Unavailable) as error:
                log.warning("lost the connection for notices from PostgreSQL, connecting again: %s", error)
                await asyncio.sleep(RETRY[min(failures, len(RETRY) - 1)])
                failures += 1

    async def _listen(self, connection: psycopg.AsyncConnection, listener: Watchers) -> None:
        while True:
            async for notice in connection.notifies(timeout=self._look):
                head, _, session_id = notice.payload.partition(" ")
                listener.advanced(session_id, int(head))
            listener.compare(await heads(self._database, listener.sessions()))

    def announce(self, session_id: str, head: int) -> None:
        # Sessions that change while a notice is being sent share the next one.
        self._pending[session_id] = head
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="perdure-store-notify")

    async def close(self) -> None:
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        try:
            while self._pending:
                payloads = [f"{head} {session_id}" for session_id, head in self._pending.items()]
                self._pending = {}
                await self._notify(payloads)
        finally:
            self._sending = None

    async def _notify(self, payloads: list[str]) -> None:
        try:
            await self._database.read(lambda tx: tx.run("notify", payloads=payloads))
        except Unavailable as error:
            # The events are committed; the next poll of each listener finds them.
            log.warning("could not notify other processes of %d sessions: %s", len(payloads), error)
