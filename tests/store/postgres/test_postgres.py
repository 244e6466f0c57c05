from collections.abc import AsyncGenerator

import psycopg
import pytest

from perdure.errors import Unavailable
from perdure.store.base import Commit, SessionQuery
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.feed import Notifications
from perdure.store.sqlstore import SqlStore
from tests.store import given

pytestmark = pytest.mark.postgres


class Mute(Notifications):
    """A process that dies between its commit and its notice, each time."""

    def announce(self, session_id: str, head: int) -> None: ...


class Attentive(Notifications):
    """Looks for lost notices all the time."""

    def __init__(self, url: str, database: PostgresDatabase) -> None:
        super().__init__(url, database, look=0.1)


async def opened(url: str, feed: type[Notifications] = Notifications) -> SqlStore:
    database = PostgresDatabase(url)
    await database.open()
    return SqlStore(database, feed(url, database))


@pytest.fixture
async def store(postgres_url: str) -> AsyncGenerator[SqlStore, None]:
    store = await opened(postgres_url)
    await store.migrate()
    await store.create_session(given.session())
    yield store
    await store.close()


@pytest.mark.usefixtures("store")
async def test_a_lost_notice_is_made_up_for(postgres_url: str) -> None:
    mute, attentive = await opened(postgres_url, Mute), await opened(postgres_url, Attentive)
    async with attentive.watch("s") as watch:
        while await watch.changed(0.5):
            pass

        await mute.commit(Commit("s", events=[given.event("a")]))

        assert await watch.changed(10)
    await mute.close()
    await attentive.close()


async def test_a_listener_that_lost_its_connection_listens_again(store: SqlStore, postgres_url: str) -> None:
    other = await opened(postgres_url)
    async with store.watch("s") as watch:
        assert await watch.changed(5)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            gone = connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
            ).fetchall()
            assert gone == [(True,)]

        await other.commit(Commit("s", events=[given.event("a")]))

        assert await watch.changed(10)
    await other.close()


async def test_the_store_outlives_the_loss_of_all_its_connections(store: SqlStore, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )

    async def written() -> bool:
        try:
            await store.commit(Commit("s", events=[given.event("a")]))
        except Unavailable:
            return False
        return True

    await given.eventually(written)
    assert await given.keys(store) == ["a"]


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    database = PostgresDatabase("postgresql://nobody@127.0.0.1:1/nothing", patience=0.2)
    await database.open()
    store = SqlStore(database, Notifications("postgresql://nobody@127.0.0.1:1/nothing", database))

    with pytest.raises(Unavailable):
        await store.sessions(SessionQuery())

    await store.close()
