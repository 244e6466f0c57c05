"""A database that an older schema made, with sessions in the middle of their work, under the code of today."""

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

import psycopg
import pytest

from perdure.errors import SchemaOutdated
from perdure.runtime.deliveries import reference
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest
from perdure.store.engine import database
from perdure.store.inputs import InputQuery
from perdure.store.values import Consumption, InputChanges, SlotWrite
from tests.store.conformance.conftest import OpenStore
from tests.support import given
from tests.support.given import answer, answering, chooses, opening

pytestmark = pytest.mark.new_schema

AT = "2026-01-02T03:04:05.678Z"
ADA = given.ADA.model_dump_json()
ASKED_P, ASKED_Q = (given.request(name).model_dump_json() for name in ("p", "q"))
APPROVED = chooses("approve").model_dump_json()

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

# What the second schema added: what people are asked, and the kind of a delivery.
SECOND_ROWS = (
    "UPDATE perdure_schema SET version = 2",
    f"""
    INSERT INTO deliveries (session_id, delivery_id, kind, owner, body, accepted_at)
    VALUES ('s', 'answer', 'answer', 'o', '{{"kind":"answer","answers":["q"]}}', '{AT}')
    """,
    f"""
    INSERT INTO inputs (
        request_id, session_id, agent, kind, status, requester, request, votes, answer, delivery_id, opened_at,
        closed_at
    ) VALUES
        ('p', 's', 'echo', 'approval', 'open', '{ADA}', '{ASKED_P}', '[]', NULL, NULL, '{AT}', NULL),
        ('q', 's', 'echo', 'approval', 'answered', '{ADA}', '{ASKED_Q}', '[{APPROVED}]', '{APPROVED}', 'answer',
            '{AT}', '{AT}')
    """,
)

# A session that was closed while a delivery waited: there was no event of that then.
ENDED_ROWS = (
    f"""
    INSERT INTO sessions (
        session_id, agent, mode, status, owner, principal, capabilities, turns, next_index, created_at, updated_at,
        closed_at
    ) VALUES (
        'over', 'echo', 'task', 'completed', '{given.ADA.owner}', '{ADA}', '{{}}', 1, 1, '{AT}', '{AT}', '{AT}'
    )
    """,
    f"""
    INSERT INTO deliveries (session_id, delivery_id, owner, idempotency_key, digest, body, turn, refused, accepted_at)
    VALUES
        ('over', 'heard', 'o', NULL, NULL, NULL, 0, NULL, '{AT}'),
        ('over', 'refused', 'o', NULL, NULL, NULL, NULL, 'STALE_TOKEN', '{AT}'),
        ('over', 'unheard', 'o', 'l', 'digest', '{{"message":"hello"}}', NULL, NULL, '{AT}')
    """,
    f"""
    INSERT INTO events (session_id, idx, key, type, at)
    VALUES ('over', 0, 'session/completed', 'session.completed', '{AT}')
    """,
)

SESSION_COLUMNS = (
    "session_id, agent, mode, status, owner, principal, capabilities, parent, title, turns, steps, tool_calls,"
    " input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, next_index, error, created_at, updated_at,"
    " closed_at"
)
DELIVERY_COLUMNS = "session_id, delivery_id, owner, idempotency_key, digest, body, turn, refused, accepted_at"

# All that the first version kept. The migration changes nothing of it but the deliveries of ended sessions.
KEPT = {
    "sessions": f"SELECT {SESSION_COLUMNS} FROM sessions ORDER BY 1",
    "routes": "SELECT token_hash, session_id FROM routes ORDER BY 1",
    "deliveries": f"SELECT {DELIVERY_COLUMNS} FROM deliveries WHERE delivery_id <> 'unheard' ORDER BY 1, 2",
    "records": "SELECT * FROM records ORDER BY 1, 2, 3, 4",
    "events": "SELECT * FROM events ORDER BY 1, 2",
    "fences": "SELECT session_id, turn, step, scope, attempt, generation FROM fences ORDER BY 1",
    "slots": "SELECT * FROM slots ORDER BY 1, 2",
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
    return run(url, list(KEPT.values()))


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def old(url: str, version: int) -> str:
    """A database as this version left it."""
    migrations = database.migrations("sqlite" if url.startswith("sqlite") else "postgres")
    run(url, [*database.statements(migrations[0]), *FIRST_ROWS, *ENDED_ROWS])
    if version == 2:
        run(url, [*database.statements(migrations[1]), *SECOND_ROWS])
    return url


@pytest.fixture
async def upgraded(old: str, open_another: OpenStore) -> Store:
    assert old
    store = await open_another()
    await store.migrate()
    return store


@pytest.mark.usefixtures("old")
async def test_an_old_schema_must_be_upgraded(open_another: OpenStore) -> None:
    store = await open_another()

    with pytest.raises(SchemaOutdated, match=r"has schema version [12]; .* Run `perdure migrate`"):
        await store.check()

    await store.migrate()
    await store.check()


async def test_an_upgrade_keeps_every_row(old: str, open_another: OpenStore) -> None:
    before = contents(old)

    await asyncio.gather(*[(await open_another()).migrate() for _ in range(3)])

    assert contents(old) == before
    assert all(before)
    assert run(old, ["SELECT application, version FROM perdure_schema"]) == [[("perdure", given.SCHEMA)]]


async def test_a_live_session_reads_as_it_did(upgraded: Store) -> None:
    row = await given.read_session(upgraded)
    (record,) = await upgraded.records("s")
    events = await given.everything(upgraded)
    consumed, refused, waiting = await upgraded.deliveries("s", ["heard", "refused", "waiting"])

    assert (row.status, row.principal, row.turns, row.events, row.title) == ("waiting", given.ADA, 2, 2, "Hi")
    assert (row.cancel_turn, row.attention, row.unsignalled) == (None, None, False)
    assert await upgraded.route("token of s") == "s"
    assert record.body == {"text": "hello"}
    assert [(event.key, event.data) for event in events] == [("a", {"n": 1}), ("b", None)]
    assert (consumed.turn, refused.refused, waiting.body) == (0, "STALE_TOKEN", {"message": "hello"})
    assert (await upgraded.slots("s", ["x"]))["x"].version == 4


async def test_a_live_session_continues(upgraded: Store) -> None:
    repeated = await upgraded.accept(replace(given.delivery("new", key="k"), owner="o"))
    await upgraded.commit(
        replace(
            given.keeping(2, turn=1),
            events=[given.event("b"), given.event("c")],
            consume=Consumption(1, ["waiting"]),
            slots=[SlotWrite("x", {"n": 2}, expected=4)],
            inputs=InputChanges(opens=[given.request()]),
        )
    )
    answered = await answer(upgraded, answering(("r", chooses("approve"))))

    assert (repeated.fresh, repeated.delivery.delivery_id) == (False, "heard")
    assert answered.closed == {"r"}
    assert await given.keys(upgraded) == ["a", "b", "c", "resolved/r"]


async def test_what_waited_still_waits_and_is_signalled_again(upgraded: Store, version: int) -> None:
    waiting = await upgraded.unread("s")

    # Together they came, and so the ids decide.
    assert [row.delivery_id for row in waiting] == (["waiting"] if version == 1 else ["answer", "waiting"])
    assert [row.ref for row in waiting] == [None] * version
    assert [found.session_id for found in await upgraded.unsignalled(older_than=60, after="", limit=10)] == ["s"]


async def test_a_reference_that_was_not_kept_is_derived(upgraded: Store, version: int) -> None:
    emitted = {row.delivery_id: reference(row, "now") for row in await upgraded.unread("s")}

    assert emitted["waiting"] == {"id": "waiting", "kind": "message", "tokenHash": "now", "at": AT}
    if version == 2:
        assert emitted["answer"] == {"id": "answer", "kind": "answer", "tokenHash": "now", "at": AT}


async def test_unread_deliveries_of_an_ended_session_are_refused(upgraded: Store) -> None:
    consumed, refused, unread = await upgraded.deliveries("over", ["heard", "refused", "unheard"])

    assert (unread.refused, unread.body, unread.turn) == ("session_not_active", None, None)
    assert (consumed.turn, consumed.refused) == (0, None)
    assert refused.refused == "STALE_TOKEN"
    assert await upgraded.unread("over") == []
    # The log of an ended session ends with its end.
    assert await given.keys(upgraded, "over") == ["session/completed"]
    again = await upgraded.accept(replace(given.delivery("new", session_id="over", key="l"), owner="o"))
    assert (again.fresh, again.delivery.refused) == (False, "session_not_active")


async def test_what_was_asked_can_be_answered_or_stopped(upgraded: Store, version: int) -> None:
    if version == 1:
        await upgraded.commit(opening("p"))

    requested = await given.cancel(upgraded)
    answered = await answer(upgraded, answering(("p", chooses("approve"))))

    assert requested == CancelRequest("s", 1)
    assert answered.closed == {"p"}
    assert await given.dense(upgraded)


async def test_no_session_of_before_has_a_family(upgraded: Store, version: int) -> None:
    row = await given.read_session(upgraded)
    asked = await upgraded.inputs(InputQuery(root="s"))

    assert (row.parent_id, row.root_id) == (None, None)
    assert (await upgraded.family("s")).sessions == []
    assert [each.request.request_id for each in asked.rows] == ([] if version == 1 else ["p"])


async def test_an_ended_session_stays_ended(upgraded: Store) -> None:
    assert await upgraded.open_sessions("", 10) == ["s"]
    assert await given.cancel(upgraded, "over") is None
    assert not await given.attend(upgraded, session_id="over")


async def test_an_upgrade_may_happen_while_the_database_is_in_use(old: str, open_another: OpenStore) -> None:
    # This one has looked at the old tables before, and holds its connections.
    store = await open_another()
    assert len(await given.everything(store)) == 2
    assert await store.record("s", 0, 0, "reply") is not None

    await (await open_another()).migrate()

    assert old
    await store.commit(opening("r"))
    assert (await given.input_row(store)).status == "open"
    assert (await given.read_session(store)).cancel_turn is None
    assert await given.keys(store) == ["a", "b"]
