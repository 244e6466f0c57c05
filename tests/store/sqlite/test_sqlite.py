import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from perdure.errors import SchemaUnknown, Unavailable
from perdure.store.base import Commit
from perdure.store.sqlite.database import SqliteDatabase
from perdure.store.sqlite.feed import ChangePoll
from perdure.store.sqlstore import SqlStore
from perdure.store.watchers import Watchers
from tests.store import given


class CountingDatabase(SqliteDatabase):
    """Counts how often it is asked for news."""

    asked = 0

    async def data_version(self) -> int:
        self.asked += 1
        return await super().data_version()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "perdure.db"


@pytest.fixture
async def database(file: Path) -> AsyncGenerator[CountingDatabase, None]:
    database = CountingDatabase(file, patience=0.1)
    yield database
    await database.close()


@pytest.fixture
async def store(database: CountingDatabase) -> SqlStore:
    store = SqlStore(database, ChangePoll(database))
    await store.migrate()
    await store.create_session(given.session())
    return store


async def test_a_database_that_stays_locked_is_unavailable_and_then_is_not(store: SqlStore, file: Path) -> None:
    intruder = sqlite3.connect(file, isolation_level=None)
    intruder.execute("BEGIN IMMEDIATE")

    with pytest.raises(Unavailable):
        await store.commit(Commit("s", events=[given.event("a")]))

    intruder.execute("ROLLBACK")
    intruder.close()
    await store.commit(Commit("s", events=[given.event("a")]))
    assert await given.keys(store) == ["a"]


async def test_a_foreign_file_is_left_as_it_was_to_the_byte(database: CountingDatabase, file: Path) -> None:
    foreign = sqlite3.connect(file)
    foreign.execute("CREATE TABLE invoices (id integer)")
    foreign.close()
    before = file.read_bytes()

    with pytest.raises(SchemaUnknown):
        await SqlStore(database, ChangePoll(database)).migrate()

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.usefixtures("store")
async def test_two_hundred_watchers_share_one_poll(database: CountingDatabase) -> None:
    watchers = Watchers(ChangePoll(database), linger=0)
    assert database.asked == 0
    assert not watchers.following

    async with asyncio.TaskGroup() as group:
        entered = asyncio.Barrier(201)
        leave = asyncio.Event()

        async def watch(n: int) -> None:
            async with watchers.watching(f"s{n}"):
                await entered.wait()
                await leave.wait()

        for n in range(200):
            group.create_task(watch(n))
        await entered.wait()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await given.eventually(lambda: database.asked >= 10)
        assert database.asked <= 10 + (loop.time() - begun) / 0.008
        leave.set()

    await given.eventually(lambda: not watchers.following)
    await watchers.close()


async def test_a_feed_that_breaks_tells_its_watchers(database: CountingDatabase) -> None:
    class Broken(ChangePoll):
        async def follow(self, audience: object) -> None:
            raise RuntimeError("no more news")

    watchers = Watchers(Broken(database))

    async with watchers.watching("s") as watch:
        with pytest.raises(Unavailable):
            await watch.changed(5)

    await watchers.close()
