"""The interface of a database for the engine, its queries and migrations (one .sql file each), and cursors of lists."""

import base64
import binascii
import functools
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from perdure.errors import Invalid

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


# --- cursors: opaque to callers, and no offsets, so that nobody misses or repeats an entry -------------------


@dataclass(frozen=True)
class Place:
    """Where a page of a list ends: a place in a list that is sorted by time, then by id.

    It is no offset, so inserts and deletes do not shift it.
    """

    at: str
    id: str


#: The length of a cursor; a longer text is refused without parsing.
_LONGEST_CURSOR = 1_000

#: Before the newest entry: it sorts after every time stamp.
NEWEST = Place("~", "")
#: Before the oldest entry.
OLDEST = Place("", "")


def write_cursor(place: Place) -> str:
    return packed(json.dumps([place.at, place.id]))


def read_cursor(cursor: str) -> Place:
    match unpacked(cursor):
        case [str(at), str(entry)]:
            return Place(at, entry)
        case _:
            raise Invalid("The cursor is not one that this server gave out.")


def packed(text: str) -> str:
    """The JSON as a cursor."""
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unpacked(cursor: str) -> Any:
    """The value that was packed; None for what is no cursor."""
    if len(cursor) > _LONGEST_CURSOR:
        return None
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None


def newest_first(cursor: str | None) -> Place:
    """The place after which a page begins, in a list that begins with the newest entry."""
    return NEWEST if cursor is None else read_cursor(cursor)


def oldest_first(cursor: str | None) -> Place:
    """The same, in a list that begins with the oldest entry."""
    return OLDEST if cursor is None else read_cursor(cursor)
