"""The interface of a database for the engine, its queries and migrations (one .sql file each), and its schema.

A shipped migration is never edited; write the next one. Older code works with a newer schema while its version is at
least `compatible`. A migration that breaks older code sets `compatible` to its own number.
"""

import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from perdure.errors import SchemaOutdated, SchemaUnknown

T = TypeVar("T")

Value: TypeAlias = str | int | bytes | Sequence[str] | None


class Row(Protocol):
    """A row of a query's result."""

    def __getitem__(self, column: str, /) -> Any: ...


class Transaction(Protocol):
    """One open transaction. A query is named by its .sql file."""

    async def rows(self, query: str, **values: Value) -> Sequence[Row]: ...

    async def row(self, query: str, **values: Value) -> Row | None: ...

    async def run(self, query: str, **values: Value) -> None:
        """Run a query without its result. Its failure may be raised later in the transaction."""
        ...

    async def define(self, statement: str) -> None:
        """Run one statement of a migration."""
        ...


Work: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Runs units of work. Work may await only its transaction, because an adapter may run it in another thread."""

    async def write(self, work: Work[T]) -> T:
        """Run the work in one transaction."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run work that only reads. Each query sees what was committed when the query started."""
        ...

    @property
    def migrations(self) -> Sequence[str]:
        """The texts of the schema's migrations, oldest first."""
        ...

    async def prepare(self) -> None:
        """Before the first migration, do what cannot be done in a transaction. The database was checked to be ours."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Written(Generic[T]):
    """The result of a transaction. `head`: the session's new number of events, if it appended some."""

    value: T
    head: int | None = None


@functools.cache
def queries(dialect: str) -> Mapping[str, str]:
    """The text of every query by name: the shared ones and those of one dialect."""
    root = files("perdure.store")
    return {**_texts(root / "sql"), **_texts(root / dialect / "sql")}


@functools.cache
def migrations(dialect: str) -> Sequence[str]:
    """The texts of a dialect's migrations, in order; the first makes version 1."""
    texts = _texts(files("perdure.store") / dialect / "migrations")
    return [texts[name] for name in sorted(texts)]


def statements(script: str) -> Sequence[str]:
    """The statements of a migration; each ends with a semicolon at the end of a line."""
    return [text for part in script.split(";\n") if (text := part.strip())]


def _texts(folder: Traversable) -> dict[str, str]:
    return {
        entry.name.removesuffix(".sql"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    }


async def heads(database: Database, session_ids: Sequence[str]) -> dict[str, int]:
    if not session_ids:
        return {}
    found = await database.read(lambda tx: tx.rows("heads", session_ids=session_ids))
    return {row["session_id"]: row["next_index"] for row in found}


# --- the schema ---------------------------------------------------------------------------------------------

APPLICATION = "perdure"

logger = logging.getLogger(__name__)


async def migrate(database: Database) -> None:
    """Upgrade the schema to the newest version that this code knows. Safe in several processes at once."""
    latest = len(database.migrations)
    # Checked before any write, and again under the lock.
    version = await database.read(lambda tx: _version(tx, latest))
    if version > latest:
        logger.warning("%s Nothing was changed.", _newer(version, latest))
    if version >= latest:
        return
    await database.prepare()
    await database.write(lambda tx: _upgrade(tx, database.migrations))


async def check(database: Database) -> int:
    """Refuse a schema that this code cannot work with; the version of one that it can work with."""
    latest = len(database.migrations)
    version = await database.read(lambda tx: _version(tx, latest))
    if version < latest:
        raise SchemaOutdated(
            f"The database has schema version {version}; this code needs {latest}. Run `perdure migrate` first."
        )
    if version > latest:
        logger.info("%s", _newer(version, latest))
    return version


async def _upgrade(tx: Transaction, migrations: Sequence[str]) -> None:
    await tx.rows("lock_schema")
    version = await _version(tx, len(migrations))
    if version >= len(migrations):
        return
    for migration in migrations[version:]:
        for statement in statements(migration):
            await tx.define(statement)
    await tx.run("set_schema", version=len(migrations))


async def _version(tx: Transaction, latest: int) -> int:
    """The schema's version; 0 in an empty database. A newer one that this code cannot work with is refused."""
    tables = {row["name"] for row in await tx.rows("tables")}
    if not tables:
        return 0
    if "perdure_schema" not in tables:
        raise SchemaUnknown("The database holds tables of something else; Perdure needs one of its own.")
    found = await tx.row("schema")
    if found is None or found["application"] != APPLICATION:
        raise SchemaUnknown("The database belongs to another application.")
    version: int = found["version"]
    if version > latest:
        await _refuse_incompatible(tx, version, latest)
    return version


async def _refuse_incompatible(tx: Transaction, version: int, latest: int) -> None:
    # Only for a newer schema: the oldest schemas have no such column.
    found = await tx.row("schema_compatible")
    needed = version if found is None else found["compatible"]
    if needed > latest:
        raise SchemaUnknown(
            f"The database has schema version {version}, which needs code that knows {needed}; "
            f"this one knows {latest}. Upgrade Perdure."
        )


def _newer(version: int, latest: int) -> str:
    return f"The database has schema version {version}, newer than the {latest} of this code, which can work with it."
