"""The suite runs once for each store."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.postgres.feed import Notifications
from tests.store import given

OpenStore: TypeAlias = Callable[[], Awaitable[Store]]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'perdure.db'}"


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
