"""A database that the first schema made, with sessions in the middle of their work, under the code of today."""

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

import psycopg
import pytest

from perdure.errors import SchemaOutdated
from perdure.store import sql
from perdure.store.base import Commit, SlotWrite, Store
from tests.store import given
from tests.store.conformance.conftest import OpenStore
from tests.store.given import answer, answering, opening, says

AT = "2026-01-02T03:04:05.678Z"
ADA = given.ADA.model_dump_json()

FIRST_ROWS = (
    "UPDATE perdure_schema SET version = 1",
    f"""
    INSERT INTO sessions (
        session_id, agent, mode, status, owner, principal, capabilities, title, turns, steps, next_index, created_at,
        updated_at
    ) VALUES (
        's', 'echo', 'conversation', 'waiting', '{given.ADA.owner}', '{ADA}', '{{"requestInput":true}}', 'Hi', 2, 3, 2,
        '{AT}', '{AT}'
    )
    """,
    "INSERT INTO routes (token_hash, session_id) VALUES ('token of s', 's')",
    f"""
    INSERT INTO deliveries (
        session_id, delivery_id, owner, idempotency_key, digest, body, turn, refused, accepted_at
    ) VALUES
        ('s', 'heard', 'o', 'k', 'digest', NULL, 0, NULL, '{AT}'),
        ('s', 'refused', 'o', NULL, NULL, NULL, NULL, 'STALE_TOKEN', '{AT}'),
        ('s', 'waiting', 'o', NULL, NULL, '{{"message":"hello"}}', NULL, NULL, '{AT}')
    """,
    f"""
    INSERT INTO records (session_id, turn, step, slot, format, body, attempt, at)
    VALUES ('s', 0, 0, 'reply', 'test/1', '{{"text":"hello"}}', 1, '{AT}')
    """,
    f"""
    INSERT INTO events (session_id, idx, key, type, turn, data, at)
    VALUES ('s', 0, 'a', 'test.event', 0, '{{"n":1}}', '{AT}'), ('s', 1, 'b', 'test.event', NULL, NULL, '{AT}')
    """,
    "INSERT INTO fences (session_id, turn, step, scope, attempt, generation) VALUES ('s', 1, 0, 'model', 2, 2)",
    "INSERT INTO slots (session_id, name, value, version) VALUES ('s', 'x', '{\"n\":1}', 4)",
)

TABLES = {
    "sessions": "*",
    "routes": "*",
    "deliveries": "session_id, delivery_id, owner, idempotency_key, digest, body, turn, refused, accepted_at",
    "records": "*",
    "events": "*",
    "fences": "*",
    "slots": "*",
}


def run(url: str, statements: Sequence[str]) -> list[list[object]]:
    """Run statements behind the store's back; the rows of each."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        try:
            return [connection.execute(statement).fetchall() for statement in statements]
        finally:
            connection.close()
    with psycopg.connect(url, autocommit=True) as connection:
        cursors = [connection.execute(statement.encode()) for statement in statements]
        return [[*cursor.fetchall()] if cursor.description else [] for cursor in cursors]


def contents(url: str) -> list[list[object]]:
    return run(url, [f"SELECT {columns} FROM {table} ORDER BY 1, 2" for table, columns in TABLES.items()])


@pytest.fixture
def first(url: str) -> str:
    """A database as the first version left it."""
    dialect = "sqlite" if url.startswith("sqlite") else "postgres"
    run(url, [*sql.statements(sql.migrations(dialect)[0]), *FIRST_ROWS])
    return url


@pytest.fixture
async def upgraded(first: str, open_another: OpenStore) -> Store:
    store = await open_another()
    await store.migrate()
    return store


async def test_the_first_schema_must_be_upgraded(first: str, open_another: OpenStore) -> None:
    store = await open_another()

    with pytest.raises(SchemaOutdated):
        await store.check()

    await store.migrate()
    await store.check()


async def test_an_upgrade_keeps_every_row(first: str, open_another: OpenStore) -> None:
    before = contents(first)

    await asyncio.gather(*[(await open_another()).migrate() for _ in range(3)])

    assert contents(first) == before
    assert all(before)


async def test_a_live_session_reads_as_it_did(upgraded: Store) -> None:
    row = await given.read_session(upgraded)
    (record,) = await upgraded.records("s")
    events = await given.everything(upgraded)
    heard, refused, waiting = await upgraded.deliveries("s", ["heard", "refused", "waiting"])

    assert (row.status, row.principal, row.turns, row.events, row.title) == ("waiting", given.ADA, 2, 2, "Hi")
    assert await upgraded.route("token of s") == "s"
    assert record.body == {"text": "hello"}
    assert [(event.key, event.data) for event in events] == [("a", {"n": 1}), ("b", None)]
    assert (heard.turn, refused.refused, waiting.body) == (0, "STALE_TOKEN", {"message": "hello"})
    assert (await upgraded.slots("s", ["x"]))["x"].version == 4


async def test_a_live_session_goes_on(upgraded: Store) -> None:
    repeated = await upgraded.accept(replace(given.delivery("new", key="k"), owner="o"))
    await upgraded.commit(
        replace(
            given.keeping(2, turn=1),
            events=[given.event("b"), given.event("c")],
            consume=["waiting"],
            consume_turn=1,
            slots=[SlotWrite("x", {"n": 2}, expected=4)],
            opens=[given.request()],
        )
    )
    answered = await answer(upgraded, answering(("r", says("approve"))))

    assert (repeated.fresh, repeated.delivery.delivery_id) == (False, "heard")
    assert answered.closed == {"r"}
    assert await given.keys(upgraded) == ["a", "b", "c", "resolved/r"]


async def test_the_deliveries_that_were_there_are_messages(upgraded: Store) -> None:
    (waiting,) = await upgraded.unheard(kind="message", older_than=60)

    assert waiting.delivery_id == "waiting"
    assert await upgraded.unheard(kind="answer", older_than=60) == []


async def test_an_upgrade_may_happen_while_the_database_is_in_use(first: str, open_another: OpenStore) -> None:
    # This one has looked at the old tables before, and holds its connections.
    store = await open_another()
    await store.commit(Commit("s", events=[given.event("c")]))
    assert len(await given.everything(store)) == 3

    await (await open_another()).migrate()

    await store.commit(opening("r"))
    assert (await given.input_row(store)).status == "open"
    assert await given.keys(store) == ["a", "b", "c"]
