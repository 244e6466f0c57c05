"""Threads that each own one connection: SQLite blocks, the event loop must not."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from perdure.errors import Unavailable

T = TypeVar("T")


class Threads:
    """Runs jobs in up to `size` threads; a thread opens its connection when it gets its first job."""

    def __init__(self, name: str, size: int, connect: Callable[[], sqlite3.Connection]) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._connect = connect
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise Unavailable("The store is closed.")
        return await _settled(self._pool.submit(self._do, job))

    async def close(self) -> None:
        """Let the jobs that have begun or wait end, then close the connections."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            self._connections.append(connection)
        return job(connection)


async def _settled(job: Future[T]) -> T:
    """The job's result. A cancelled caller leaves only once the job has ended, or will never begin."""
    waiting = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not job.cancel():
            await asyncio.wait([waiting])
        raise
