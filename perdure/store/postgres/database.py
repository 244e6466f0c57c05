"""`Database` over PostgreSQL: a pool of connections; each transaction is one pipeline."""

import re
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from perdure.errors import Invalid, Misconfigured, OutcomeUnknown, Unavailable
from perdure.store.engine import database
from perdure.store.engine.database import Row, T, Value, Work

Connection: TypeAlias = psycopg.AsyncConnection[DictRow]

#: Connections of one process, and the seconds that a caller waits for one.
SIZE = 10
PATIENCE = 5.0

#: A dead peer is detected within half a minute. The default of the system is two hours.
KEEPALIVE: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "connect_timeout": 5,
}

_PLACEHOLDER = re.compile(r"(?<!:):([a-z_]+)")
#: There may be several hosts, each with a port.
_PORTS = re.compile("[0-9,]*")


class PostgresTransaction:
    """`run` does not wait for an answer: the pipeline sends its query together with the next one that does."""

    def __init__(self, connection: Connection, queries: dict[str, bytes]) -> None:
        self._connection = connection
        self._queries = queries

    async def rows(self, query: str, **values: Value) -> Sequence[Row]:
        cursor = await self._connection.execute(self._queries[query], values)
        return await cursor.fetchall()

    async def row(self, query: str, **values: Value) -> Row | None:
        cursor = await self._connection.execute(self._queries[query], values)
        return await cursor.fetchone()

    async def run(self, query: str, **values: Value) -> None:
        await self._connection.execute(self._queries[query], values)

    async def define(self, statement: str) -> None:
        await self._connection.execute(statement.encode())


def address(url: str) -> Mapping[str, Any]:
    """The parts of an address as libpq reads them; `Misconfigured` for one with a password that has spilt over."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        parts = None
    if parts is None or _has_spilt(parts):
        # Not quoted: any of it may be a part of the password.
        raise Misconfigured(
            "The address of the PostgreSQL database cannot be read: its options are those of libpq, and the "
            "special characters of its user and password are percent-encoded (`@` as %40, `/` as %2F)."
        )
    return parts


def _has_spilt(parts: Mapping[str, Any]) -> bool:
    """Whether a part of a password has become one of something else, as after an `@` or a `/` in it."""
    host, port, name = (str(parts.get(each, "")) for each in ("host", "port", "dbname"))
    return "@" in host or not _PORTS.fullmatch(port) or ("@" in name and "user" not in parts)


class PostgresDatabase:
    """`Database` over a PostgreSQL database."""

    def __init__(self, url: str, *, size: int = SIZE, patience: float = PATIENCE) -> None:
        # psycopg writes the placeholder of all queries, `:name`, as `%(name)s`.
        queries = database.queries("postgres")
        self._queries = {name: _PLACEHOLDER.sub(r"%(\1)s", text).encode() for name, text in queries.items()}
        self.migrations: Sequence[str] = database.migrations("postgres")
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            connection_class=psycopg.AsyncConnection[DictRow],
            kwargs={"autocommit": True, "row_factory": dict_row, "application_name": "perdure", **KEEPALIVE},
            configure=_configure,
            min_size=1,
            max_size=size,
            timeout=patience,
            open=False,
        )

    async def open(self) -> None:
        """Begin to connect. A failure is raised by the first query."""
        await self._pool.open()

    async def write(self, work: Work[T]) -> T:
        async with self._connection() as connection:
            try:
                # Leaving the pipeline waits for the answer to COMMIT, so a returned result is durable.
                async with connection.pipeline(), connection.transaction():
                    return await work(PostgresTransaction(connection, self._queries))
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if connection.broken:
                    # COMMIT may have reached the server.
                    raise OutcomeUnknown from error
                raise

    async def read(self, work: Work[T]) -> T:
        async with self._connection() as connection:
            return await work(PostgresTransaction(connection, self._queries))

    async def prepare(self) -> None:
        """Nothing to do: PostgreSQL migrates in transactions."""

    async def close(self) -> None:
        await self._pool.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Connection, None]:
        with translated():
            async with self._pool.connection() as connection:
                yield connection


async def _configure(connection: Connection) -> None:
    # A process that hangs in a transaction must not keep the lock of a session's row.
    await connection.execute("SET idle_in_transaction_session_timeout = '30s'")
    await connection.execute("SET lock_timeout = '10s'")


@contextmanager
def translated() -> Generator[None, None, None]:
    """Translate errors of psycopg into errors of the store."""
    try:
        yield
    except UnicodeEncodeError as unpaired:
        raise Invalid("A name may not hold an unpaired surrogate.") from unpaired
    except psycopg.DataError as error:
        if "NUL" in str(error):
            raise Invalid("A name may not hold a NUL character.") from error
        raise
    except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction) as error:
        raise Unavailable(f"The database cannot take this right now: {error}") from error
