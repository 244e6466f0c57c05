"""`Database` over SQLite: one thread writes, a few threads read, each with its own connection (WAL)."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.errors import Invalid, Misconfigured, SchemaUnknown, Unavailable
from perdure.store.engine import database
from perdure.store.engine.database import Row, T, Value, Work, heads
from perdure.store.engine.rows import encode
from perdure.store.watchers import Watchers

#: Seconds to wait for another process to finish its transaction.
PATIENCE = 5.0
READERS = 4

_OLDEST = (3, 35, 0)

# Primary result codes of transient errors.
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)


class SqliteTransaction:
    """Its coroutines never suspend, so a thread can run them without an event loop."""

    def __init__(self, connection: sqlite3.Connection, queries: dict[str, str]) -> None:
        self._connection = connection
        self._queries = queries

    async def rows(self, query: str, **values: Value) -> Sequence[Row]:
        return self._execute(query, values).fetchall()

    async def row(self, query: str, **values: Value) -> Row | None:
        # Fetch all rows: a statement that is not read to its end keeps its lock.
        found = self._execute(query, values).fetchall()
        return found[0] if found else None

    async def run(self, query: str, **values: Value) -> None:
        self._execute(query, values)

    async def define(self, statement: str) -> None:
        self._connection.execute(statement)

    def _execute(self, query: str, values: dict[str, Value]) -> sqlite3.Cursor:
        return self._connection.execute(self._queries[query], {name: _bound(value) for name, value in values.items()})


class SqliteDatabase:
    """`Database` over a file, or over memory when there is no file."""

    def __init__(
        self, file: Path | None, *, synced: bool = False, patience: float = PATIENCE, readers: int = READERS
    ) -> None:
        """`synced`: each commit waits for the disk."""
        if sqlite3.sqlite_version_info < _OLDEST:
            raise Misconfigured(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 is needed.")
        self._file = file
        self._synced = synced
        self._patience = patience
        self._queries = dict(database.queries("sqlite"))
        self.migrations: Sequence[str] = database.migrations("sqlite")
        self._writer = Threads("perdure-sqlite-writer", 1, self._connect)
        # A database in memory exists in its one connection only.
        self._readers = Threads("perdure-sqlite-reader", readers, self._connect_reader) if file else self._writer
        # For the polls: opened with the first one.
        self._poller: sqlite3.Connection | None = None

    async def write(self, work: Work[T]) -> T:
        return await self._writer.run(lambda connection: self._transact(connection, work))

    async def read(self, work: Work[T]) -> T:
        return await self._readers.run(lambda connection: self._read(connection, work))

    async def prepare(self) -> None:
        if self._file is not None:
            await self._writer.run(self._use_wal)

    def data_version(self) -> int:
        """A number that changes with each commit of any process; `Unavailable` when it would have to wait for it."""
        # Without a thread: the change of threads takes fifteen times as long as the question, which reads shared
        # memory only. It must never wait here, because nothing else runs meanwhile.
        with _translated():
            if self._poller is None:
                self._poller = self._connect(patience=0)
            return self._poller.execute("PRAGMA data_version").fetchone()[0]

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        await self._readers.close()
        await self._writer.close()

    def _connect(self, *, patience: float | None = None) -> sqlite3.Connection:
        """A connection, which waits for other processes for `patience` seconds."""
        wait = self._patience if patience is None else patience
        with _translated():
            connection = sqlite3.connect(
                self._file or ":memory:", timeout=wait, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            # WAL keeps commits atomic without a sync for each; only a power failure may lose the last ones.
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._synced else 'NORMAL'}")
            return connection

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = ON")
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # SQLite does not wait for other connections when the journal mode changes.
        deadline = time.monotonic() + self._patience
        while True:
            try:
                with _translated():
                    connection.execute("PRAGMA journal_mode = WAL").fetchall()
                    return
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _transact(self, connection: sqlite3.Connection, work: Work[T]) -> T:
        with _translated():
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = _finish(work(SqliteTransaction(connection, self._queries)))
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return result

    def _read(self, connection: sqlite3.Connection, work: Work[T]) -> T:
        with _translated():
            return _finish(work(SqliteTransaction(connection, self._queries)))


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("work on the store may await its transaction only")


def _bound(value: Value) -> str | int | bytes | None:
    match value:
        case str() if "\0" in value:
            raise Invalid("A name may not hold a NUL character.")
        case None | str() | int() | bytes():
            return value
        case _:
            return encode(list(value))


@contextmanager
def _translated() -> Generator[None, None, None]:
    try:
        yield
    except UnicodeEncodeError as unpaired:
        raise Invalid("A name may not hold an unpaired surrogate.") from unpaired
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _PASSING:
            raise Unavailable(f"The database cannot take this right now: {error}.") from error
        if code == sqlite3.SQLITE_NOTADB:
            raise SchemaUnknown("The file is not an SQLite database.") from error
        raise


class Threads:
    """Runs jobs in up to `size` threads. A thread opens its connection with its first job."""

    def __init__(self, name: str, size: int, connect: Callable[[], sqlite3.Connection]) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._connect = connect
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise Unavailable("The store is closed.")
        submitted = self._pool.submit(self._do, job)
        waiting = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # A cancelled caller returns only after the job has ended, or was removed before it began.
            if not submitted.cancel():
                await asyncio.wait([waiting])
            raise

    async def close(self) -> None:
        """Wait for running and queued jobs, then close the connections."""
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

    async def follow(self, listener: Watchers) -> None:
        loop = asyncio.get_running_loop()
        # No version is known: the first poll compares in any case, for writes before it.
        seen: int | None = None
        news_at = loop.time()
        while True:
            try:
                version = self._database.data_version()
                if version != seen:
                    listener.compare(await heads(self._database, listener.sessions()))
                    seen, news_at = version, loop.time()
            except Unavailable:
                # Readers get the same error when they read. The next poll compares in any case.
                seen = None
            silence = loop.time() - news_at
            await asyncio.sleep(EAGER if silence < BURST else BUSY if silence < SILENCE else QUIET)

    def announce(self, session_id: str, head: int) -> None:
        """Nothing to do: other processes poll for the commit."""

    async def close(self) -> None: ...


class NoFeed:
    """The feed of a database in memory: no other process can write to it."""

    async def follow(self, listener: Watchers) -> None: ...

    def announce(self, session_id: str, head: int) -> None: ...

    async def close(self) -> None: ...
