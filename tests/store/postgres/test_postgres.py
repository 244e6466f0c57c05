import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from perdure.errors import OutcomeUnknown, Unavailable
from perdure.store.engine import database
from perdure.store.engine.database import T, Transaction, Work
from perdure.store.engine.store import SqlStore
from perdure.store.lifecycle import NewFork
from perdure.store.postgres.database import PostgresDatabase, PostgresTransaction
from perdure.store.postgres.feed import Notifications
from perdure.store.values import Commit, NewRecord, SessionQuery
from tests.store.plans import (
    CROWD,
    FAMILIES,
    LISTINGS,
    LONG_LIFE,
    SOME_OF_IT,
    THEIR_DELIVERIES,
    THEIR_INPUTS,
    THEIR_RECORDS,
    Ran,
    recorded,
)
from tests.support import given
from tests.support.waiting import until

# What the planner chooses depends on what a database held before.
pytestmark = [pytest.mark.postgres, pytest.mark.new_schema]


class Mute(Notifications):
    """A process that dies between its commit and its notice, each time."""

    def announce(self, session_id: str, head: int) -> None: ...


class Attentive(Notifications):
    """Looks for lost notices all the time."""

    def __init__(self, url: str, database: PostgresDatabase) -> None:
        super().__init__(url, database, look=0.1)


class RecordingDatabase(PostgresDatabase):
    """Notes what is read from it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.ran: list[Ran] = []

    async def read(self, work: Work[T]) -> T:
        return await super().read(recorded(work, self.ran))


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

        assert await watch.changed(60)
    await mute.close()
    await attentive.close()


async def test_a_listener_that_lost_its_connection_listens_again(store: SqlStore, postgres_url: str) -> None:
    other = await opened(postgres_url)
    async with store.watch("s") as watch:
        assert await watch.changed(60)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            gone = connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
            ).fetchall()
            assert gone == [(True,)]

        await other.commit(Commit("s", events=[given.event("a")]))

        assert await watch.changed(60)
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

    await until(written)
    assert await given.keys(store) == ["a"]


async def test_a_connection_that_breaks_in_a_transaction_leaves_its_outcome_unknown(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    await database.open()

    async def die(tx: Transaction) -> None:
        await tx.define("SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(OutcomeUnknown):
        await database.write(die)
    await database.close()


class Forgetful(PostgresDatabase):
    """Dies behind each first commit, before it can say that it has kept it; then it is away for some time."""

    away = 0

    async def write(self, work: Work[T]) -> T:
        if self.away == 1:
            self.away = 0
            return await super().write(work)
        if self.away > 1:
            self.away -= 1
            raise Unavailable
        await super().write(work)
        self.away = 3
        raise OutcomeUnknown


@pytest.mark.usefixtures("store")
async def test_a_cancel_whose_answer_was_lost_is_about_the_turn_that_it_was_asked_for(postgres_url: str) -> None:
    class TurnEndsMeanwhile(Forgetful):
        """Before the retry, the turn has been stopped and the next one is about to begin."""

        async def write(self, work: Work[T]) -> T:
            if self.away == 1:
                await ended.commit(replace(given.ending(), unless_cancelled=None, close_turn=0))
                await ended.accept(given.delivery("next"))
            return await super().write(work)

    ended = await opened(postgres_url)
    await ended.accept(given.delivery("first"))
    database = TurnEndsMeanwhile(postgres_url)
    await database.open()
    store = SqlStore(database, Mute(postgres_url, database))

    request = await store.cancel("s", None, lambda turn: given.event(f"stop {turn}"))

    assert request is not None
    assert request.turn == 0
    assert [key for key in await given.keys(store) if key.startswith("stop")] == ["stop 0"]
    await store.close()
    await ended.close()


@pytest.mark.usefixtures("store")
async def test_the_outcome_of_a_commit_is_left_to_the_caller(postgres_url: str) -> None:
    """A retry finds its own fence, and cannot say that it has taken it from an older attempt."""
    database = Forgetful(postgres_url)
    await database.open()
    store = SqlStore(database, Mute(postgres_url, database))

    with pytest.raises(OutcomeUnknown):
        await store.commit(Commit("s", events=[given.event("a")]))

    assert await given.keys(store) == ["a"]
    await store.close()


@pytest.mark.usefixtures("store")
async def test_what_was_committed_is_accepted_though_the_answer_was_lost(postgres_url: str) -> None:
    database = Forgetful(postgres_url)
    await database.open()
    store = SqlStore(database, Mute(postgres_url, database))

    await store.create_session(given.session("new", token="new"), given.delivery("first", session_id="new"))
    await store.accept(given.delivery("second", session_id="new"))
    cancel_request = await store.cancel("new", None, lambda turn: given.event(f"stop {turn}"))

    assert [each.delivery_id for each in await store.unread("new")] == ["first", "second"]
    assert cancel_request is not None
    assert [event.key for event in await store.events("new")] == ["stop 0"]
    await store.close()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("plans", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize(("query", "index"), LISTINGS)
async def test_a_list_of_sessions_is_found_by_an_index_and_nothing_is_sorted(
    postgres_url: str, query: SessionQuery, index: str, plans: str
) -> None:
    plan = explained(postgres_url, await ran(postgres_url, lambda store: store.sessions(query)), plans)

    assert f"using {index} " in plan
    assert "Seq Scan" not in plan
    assert "Sort" not in plan


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("plans", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize(("read", "indexes"), FAMILIES)
async def test_a_family_and_what_it_asks_are_found_by_indexes(
    postgres_url: str, read: Callable[[SqlStore], Awaitable[object]], indexes: Sequence[str], plans: str
) -> None:
    plan = explained(postgres_url, await ran(postgres_url, read), plans)

    assert [index for index in indexes if f" {index} " not in plan] == []
    assert "Seq Scan" not in plan


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("plans", ["force_generic_plan", "force_custom_plan"])
async def test_a_page_of_unsignalled_sessions_costs_a_page(postgres_url: str, plans: str) -> None:
    asked = await ran(postgres_url, lambda store: store.unsignalled(older_than=5, after="crowd-1", limit=10))

    plan = explained(postgres_url, asked, plans)

    for index in ("deliveries_waiting", "sessions_to_cancel", "sessions_untold"):
        assert f"using {index} " in plan
    assert "Seq Scan" not in plan


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("plans", ["force_generic_plan", "force_custom_plan"])
async def test_the_records_of_a_session_and_of_its_parents_are_found_by_their_key(
    postgres_url: str, plans: str
) -> None:
    asked = await ran(postgres_url, lambda store: store.records("s"))

    plan = explained(postgres_url, asked, plans)

    assert plan.count("records_pkey") == 2, plan
    assert "Seq Scan on records" not in plan
    assert "Seq Scan on sessions" not in plan


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("plans", ["force_generic_plan", "force_custom_plan"])
async def test_what_has_happened_in_some_time_is_found_by_indexes(postgres_url: str, plans: str) -> None:
    asked = await all_ran(postgres_url, lambda store: store.attempts.happened("s", *SOME_OF_IT, 1_000))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for statement in LONG_LIFE:
            connection.execute(f"WITH numbers (n) AS (SELECT generate_series(1, 2000)) {statement}".encode())
        connection.execute("ANALYZE attempts, deliveries")

    of_attempts, of_deliveries = [planned(postgres_url, each, plans) for each in asked]

    for index in ("attempts_by_start", "attempts_by_end"):
        assert f" {index} " in of_attempts, of_attempts
    for index in ("deliveries_of_session", "deliveries_by_start"):
        assert f" {index} " in of_deliveries, of_deliveries
    assert "Seq Scan on attempts" not in of_attempts
    assert "Seq Scan on deliveries" not in of_deliveries


async def ran(url: str, read: Callable[[SqlStore], Awaitable[object]]) -> Ran:
    """The one query that this reads with."""
    (only,) = await all_ran(url, read)
    return only


async def all_ran(url: str, read: Callable[[SqlStore], Awaitable[object]]) -> Sequence[Ran]:
    """The queries that this reads with."""
    database = RecordingDatabase(url)
    await database.open()
    try:
        await read(SqlStore(database, Notifications(url, database)))
    finally:
        await database.close()
    return database.ran


def explained(url: str, ran: Ran, plans: str) -> str:
    """The plan of a query when there are many sessions."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (CROWD, THEIR_DELIVERIES, THEIR_INPUTS, *THEIR_RECORDS):
            connection.execute(f"WITH numbers (n) AS (SELECT generate_series(1, 2000)) {statement}".encode())
        connection.execute("ANALYZE sessions, deliveries, inputs, records")
    return planned(url, ran, plans)


def planned(url: str, ran: Ran, plans: str) -> str:
    """The plan of a prepared query: a connection prepares what it has run a few times, and plans it without values."""
    text, names = database.queries("postgres")[ran.query], list(ran.values)
    for number, name in enumerate(names, 1):
        text = re.sub(rf"(?<!:):{name}\b", f"${number}", text)
    values = ", ".join(f"%({name})s" for name in names)
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor[Any]) as connection:
        connection.execute(f"SET plan_cache_mode = {plans}".encode())
        connection.execute(f"PREPARE listing AS {text}".encode())
        plan = connection.execute(f"EXPLAIN EXECUTE listing ({values})".encode(), ran.values).fetchall()
        return "\n".join(line for (line,) in plan)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    database = PostgresDatabase("postgresql://nobody@127.0.0.1:1/nothing", patience=0.2)
    await database.open()
    store = SqlStore(database, Notifications("postgresql://nobody@127.0.0.1:1/nothing", database))

    with pytest.raises(Unavailable):
        await store.sessions(SessionQuery())

    await store.close()


@pytest.mark.parametrize("inside", [False, True])
async def test_two_deletions_at_once_lose_no_turns_of_a_fork(
    store: SqlStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """The grandparent hands its turns to one fork while the parent is about to give it another fork."""
    for turn in range(3):
        await one_turn(store, turn, "s")
    await store.fork(NewFork("heir", "token of heir", "s", 2))
    await store.fork(NewFork("parent", "token of parent", "s", 1))
    await one_turn(store, 2, "parent")
    cut = NewRecord(2, 0, "cut", "test/1", {"of": "f"}) if inside else None
    await store.fork(NewFork("f", "token of f", "parent", 2, step=0, cut=cut))
    before = await store.records("f")
    for session_id in ("s", "parent"):
        await store.commit(given.closing(session_id))
        await store.begin_deletion(session_id)
    reached, released = asyncio.Event(), asyncio.Event()
    run = PostgresTransaction.run

    async def waits_before_its_commit(tx: PostgresTransaction, query: str, **values: Any) -> None:
        if query == "count_deleted" and values["session_id"] == "parent" and not reached.is_set():
            reached.set()
            await released.wait()
        await run(tx, query, **values)

    monkeypatch.setattr(PostgresTransaction, "run", waits_before_its_commit)
    other = await opened(postgres_url)
    try:
        first = asyncio.create_task(store.purge("parent", 100))
        await reached.wait()
        second = asyncio.create_task(other.purge("s", 100))
        await until(lambda: waits_for_a_lock(postgres_url), "the second deletion to wait for the first")
        released.set()
        await asyncio.gather(first, second)
        for session_id in ("parent", "s"):
            while not await store.purge(session_id, 100):
                pass
    finally:
        await other.close()

    assert [(each.turn, each.key) for each in await store.records("f")] == [(each.turn, each.key) for each in before]


async def test_a_deletion_that_is_asked_for_again_does_not_wait_for_the_one_that_waits_for_it(
    store: SqlStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.commit(given.closing("s"))
    await store.begin_deletion("s")
    reached, released = asyncio.Event(), asyncio.Event()
    run = PostgresTransaction.run

    async def waits_with_the_session(tx: PostgresTransaction, query: str, **values: Any) -> None:
        if query == "insert_deletion":
            reached.set()
            await released.wait()
        await run(tx, query, **values)

    monkeypatch.setattr(PostgresTransaction, "run", waits_with_the_session)
    other = await opened(postgres_url)
    try:
        again = asyncio.create_task(store.begin_deletion("s"))
        await reached.wait()
        purge = asyncio.create_task(other.purge("s", 100))
        await until(lambda: waits_for_a_lock(postgres_url), "the deletion to wait for the session")
        released.set()
        deletion, _ = await asyncio.gather(again, purge)
    finally:
        await other.close()

    assert deletion is not None
    assert await store.session("s") is None


async def one_turn(store: SqlStore, turn: int, session_id: str) -> None:
    await store.commit(given.running(turn, session_id))
    await store.commit(Commit(session_id, records=[given.record(turn=turn, of=session_id)]))
    await store.commit(given.ending(turn, session_id))


def waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as connection:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return connection.execute(waiting).fetchone() is not None


async def test_a_deletion_holds_one_lane_at_a_time(store: SqlStore, postgres_url: str) -> None:
    for each in ("l0", "l1"):
        await store.create_session(replace(given.session(each), lane=each, lane_of="s"), None)
    await store.begin_deletion("s")
    lock = "SELECT session_id FROM sessions WHERE session_id = %s FOR UPDATE NOWAIT"
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

    with psycopg.connect(postgres_url) as connection:
        connection.execute(lock, ("l1",))
        deletion = asyncio.create_task(store.delete_children("s", 10))
        with psycopg.connect(postgres_url, autocommit=True) as onlooker:

            async def waits() -> bool:
                return onlooker.execute(waiting).fetchone() is not None

            await until(waits)

        # Whoever has one lane of a session may wait for another, in the order of their forks.
        assert connection.execute(lock, ("l0",)).fetchone() == ("l0",)

    assert await deletion
    assert set(await store.unfinished_parts("s", 10)) == {"l0", "l1"}
