"""The suite runs once for each store."""

import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, LiteralString, TypeAlias

import psycopg
import pytest

from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.postgres.feed import Notifications
from tests.support import given

OpenStore: TypeAlias = Callable[[], Awaitable[Store]]

#: What a principal has spent is of no session, and under a name that tells nothing of the principal. Nor are streams
#: that callers write.
OF_NO_SESSION = (
    *("perdure_schema", "deletions", "deleted_keys", "spending"),
    *("streams", "stream_items", "stream_producers"),
)


class Database:
    """The database behind the store's back."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, statement: LiteralString) -> list[Any]:
        if self._url.startswith("sqlite"):
            connection = sqlite3.connect(self._url.removeprefix("sqlite:///"), isolation_level=None)
            try:
                return connection.execute(statement).fetchall()
            finally:
                connection.close()
        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def tables(self) -> list[str]:
        if self._url.startswith("sqlite"):
            return sorted(name for (name,) in self.run("SELECT name FROM sqlite_master WHERE type = 'table'"))
        return sorted(name for (name,) in self.run("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'perdure.db'}"


@pytest.fixture
def database(url: str) -> Database:
    return Database(url)


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners do not look for notices that they lost: what is missed stays missed, however long a test waits."""
    monkeypatch.setattr(Notifications.__init__, "__defaults__", (3600.0,))


@pytest.fixture
async def open_another(url: str) -> AsyncGenerator[OpenStore, None]:
    """Opens one more store on the same database, as another process would."""
    opened: list[Store] = []

    async def another() -> Store:
        opened.append(await open_store(url))
        return opened[-1]

    yield another
    for store in opened:
        await store.close()


@pytest.fixture
async def empty(open_another: OpenStore) -> Store:
    """A store with a schema and nothing else."""
    store = await open_another()
    await store.migrate()
    return store


@pytest.fixture
async def store(empty: Store) -> Store:
    """A store with one session, `s`."""
    await empty.create_session(given.session())
    return empty


@pytest.fixture
async def other(store: Store, open_another: OpenStore) -> Store:
    """A second store on the database of the first."""
    return await open_another()
