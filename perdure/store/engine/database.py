"""What the engine needs of a database, and where its queries and migrations lie: one .sql file each."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

T = TypeVar("T")

Value: TypeAlias = str | int | Sequence[str] | None


class Row(Protocol):
    """A row as a query returned it."""

    def __getitem__(self, column: str, /) -> Any: ...


class Transaction(Protocol):
    """One open transaction. Queries go by the names of their .sql files."""

    async def rows(self, query: str, **values: Value) -> Sequence[Row]: ...

    async def row(self, query: str, **values: Value) -> Row | None: ...

    async def run(self, query: str, **values: Value) -> None:
        """Run a query whose result nobody needs; a failure may show itself only later in the transaction."""
        ...

    async def define(self, statement: str) -> None:
        """Run one statement of a migration."""
        ...


Work: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Runs units of work. Work awaits nothing but its transaction: an adapter may run it in a thread of its own."""

    async def write(self, work: Work[T]) -> T:
        """Run the work in one transaction: all of it happens, or none."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run work that only reads; each of its queries sees what is committed when it starts."""
        ...

    @property
    def migrations(self) -> Sequence[str]:
        """The texts of the schema's migrations, oldest first."""
        ...

    async def prepare(self) -> None:
        """Do what a transaction cannot before the first migration, once the database is known to be ours."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Told(Generic[T]):
    """What a transaction came to, and where the session's events end now when it appended some."""

    value: T
    head: int | None = None


def queries(dialect: str) -> Mapping[str, str]:
    """The text of every query by name: those that all stores share, then those of one dialect."""
    root = files("perdure.store")
    return {**_texts(root / "sql"), **_texts(root / dialect / "sql")}


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
