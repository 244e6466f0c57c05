import asyncio
import contextlib
import re
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from perdure.errors import SchemaUnknown, Unavailable
from perdure.store.engine.database import T, Work, queries
from perdure.store.engine.store import SqlStore
from perdure.store.open import open_store
from perdure.store.sqlite.database import ChangePoll, SqliteDatabase
from perdure.store.values import Commit, SessionQuery
from perdure.store.watchers import Watchers
from tests.store.plans import (
    CROWD,
    FAMILIES,
    LISTINGS,
    LONG_LIFE,
    SOME_OF_IT,
    THEIR_DELIVERIES,
    THEIR_INPUTS,
    Ran,
    recorded,
)
from tests.support import given
from tests.support.waiting import until

#: A table, for statements that fill others.
NUMBERS = "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 2000)"


class CountingDatabase(SqliteDatabase):
    """Counts how often it is asked for news."""

    asked = 0

    def data_version(self) -> int:
        self.asked += 1
        return super().data_version()


class RecordingDatabase(SqliteDatabase):
    """Notes what is read from it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.ran: list[Ran] = []

    async def read(self, work: Work[T]) -> T:
        return await super().read(recorded(work, self.ran))


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


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("query", "index"), LISTINGS)
async def test_a_list_of_sessions_is_found_by_an_index_and_nothing_is_sorted(
    file: Path, query: SessionQuery, index: str
) -> None:
    plan = explained(file, await ran(file, lambda store: store.sessions(query)))

    assert f"USING INDEX {index} (" in plan
    assert "SCAN" not in plan
    assert "TEMP B-TREE" not in plan


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("read", "indexes"), FAMILIES)
async def test_a_family_and_what_it_asks_are_found_by_indexes(
    file: Path, read: Callable[[SqlStore], Awaitable[object]], indexes: Sequence[str]
) -> None:
    plan = explained(file, await ran(file, read))

    assert [index for index in indexes if f"SEARCH {index.split('_by_')[0]} USING INDEX {index} (" not in plan] == []
    assert "SCAN" not in plan


@pytest.mark.usefixtures("store")
async def test_a_page_of_unsignalled_sessions_costs_a_page(file: Path) -> None:
    plan = explained(file, await ran(file, lambda store: store.unsignalled(older_than=5, after="crowd-1", limit=200)))

    for index in ("deliveries_waiting", "sessions_to_cancel", "sessions_untold"):
        assert f"INDEX {index} (session_id>?)" in plan
    assert "INDEX sessions_by_status (status=? AND created_at<?)" in plan
    assert "SCAN sessions" not in plan
    assert "SCAN deliveries" not in plan


@pytest.mark.usefixtures("store")
async def test_a_backlog_is_counted_in_indexes(file: Path) -> None:
    plan = explained(file, await ran(file, lambda store: store.attempts.backlog(10_000)))

    # The last three are partial: they have nothing but what is counted.
    for index in ("sessions_by_status", r"sessions_(by_owner_)?in_need", "inputs_open", "deliveries_(waiting|unheard)"):
        assert re.search(f"USING (COVERING )?INDEX {index}", plan), plan


@pytest.mark.usefixtures("store")
async def test_the_records_of_a_session_and_of_its_parents_are_found_by_their_key(file: Path) -> None:
    plan = explained(file, await ran(file, lambda store: store.records("s")))

    assert plan.count("SEARCH records USING INDEX sqlite_autoindex_records_1 (session_id=? AND turn>") == 2, plan
    assert "SCAN records" not in plan
    assert "SCAN sessions" not in plan


@pytest.mark.usefixtures("store")
async def test_a_page_costs_the_same_however_many_sessions_are_unsignalled(file: Path) -> None:
    asked = await ran(file, lambda store: store.unsignalled(older_than=5, after="crowd-1", limit=20))
    with contextlib.closing(crowded(file)) as connection:
        many = steps(connection, asked)
        for table in ("deliveries", "sessions"):
            connection.execute(f"DELETE FROM {table} WHERE session_id > 'crowd-1100'")
        few = steps(connection, asked)

    assert many < few * 1.1


@pytest.mark.usefixtures("store")
async def test_what_has_happened_in_some_time_costs_the_same_however_long_the_session_lives(file: Path) -> None:
    asked = await all_ran(file, lambda store: store.attempts.happened("s", *SOME_OF_IT, 1_000))
    with contextlib.closing(crowded(file)) as connection:
        for statement in LONG_LIFE:
            connection.execute(f"{NUMBERS} {statement}")
        long = [steps(connection, each) for each in asked]
        for table in ("attempts", "deliveries"):
            connection.execute(f"DELETE FROM {table} WHERE session_id = 's' AND started_at >= '2026-11100'")
            connection.execute(f"DELETE FROM {table} WHERE session_id = 's' AND started_at < '2026-10900'")
        short = [steps(connection, each) for each in asked]

    assert len(asked) == 2
    assert all(0 < after <= before * 1.1 for before, after in zip(short, long, strict=True))


def steps(connection: sqlite3.Connection, ran: Ran) -> int:
    """How much work a query is, as the database counts it."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1

    connection.set_progress_handler(step, 10)
    connection.execute(queries("sqlite")[ran.query], ran.values).fetchall()
    connection.set_progress_handler(None, 0)
    return taken


async def ran(file: Path, read: Callable[[SqlStore], Awaitable[object]]) -> Ran:
    """The one query that this reads with."""
    (only,) = await all_ran(file, read)
    return only


async def all_ran(file: Path, read: Callable[[SqlStore], Awaitable[object]]) -> Sequence[Ran]:
    """The queries that this reads with."""
    database = RecordingDatabase(file)
    try:
        await read(SqlStore(database, ChangePoll(database)))
    finally:
        await database.close()
    return database.ran


def explained(file: Path, ran: Ran) -> str:
    with contextlib.closing(crowded(file)) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {queries('sqlite')[ran.query]}", ran.values)
        return "\n".join(detail for *_, detail in plan)


def crowded(file: Path) -> sqlite3.Connection:
    """With many more sessions, which are forgotten when the connection is closed."""
    connection = sqlite3.connect(file)
    connection.execute(f"{NUMBERS} {CROWD}")
    connection.execute(f"{NUMBERS} {THEIR_DELIVERIES}")
    connection.execute(f"{NUMBERS} {THEIR_INPUTS}")
    return connection


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
    loop = asyncio.get_running_loop()
    begun = loop.time()

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
        await until(lambda: database.asked >= 10)
        assert database.asked <= 10 + (loop.time() - begun) / 0.008
        leave.set()

    await until(lambda: not watchers.following)
    await watchers.close()


async def test_a_feed_that_breaks_fails_its_watchers(database: CountingDatabase) -> None:
    class Broken(ChangePoll):
        async def follow(self, listener: object) -> None:
            raise RuntimeError("no more news")

    watchers = Watchers(Broken(database))

    async with watchers.watching("s") as watch:
        with pytest.raises(Unavailable):
            await watch.changed(60)

    await watchers.close()


@pytest.mark.parametrize(("address", "mode"), [("", 1), ("?synchronous=full", 2)])
async def test_commits_wait_for_the_disk_where_that_is_wanted(
    file: Path, monkeypatch: pytest.MonkeyPatch, address: str, mode: int
) -> None:
    modes: set[int] = set()

    def noted(self: SqliteDatabase, connection: sqlite3.Connection, work: Work[T]) -> T:
        modes.add(connection.execute("PRAGMA synchronous").fetchone()[0])
        return transact(self, connection, work)

    transact = SqliteDatabase._transact  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(SqliteDatabase, "_transact", noted)
    store = await open_store(f"sqlite:///{file}{address}")
    await store.migrate()
    await store.create_session(given.session())
    await store.close()

    assert modes == {mode}
    assert file.exists()
