"""Deleting sessions of the real product: no row, no execution and no list entry is left."""

import asyncio
import re
import sqlite3
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from perdure.dev.supervisor import command
from perdure.protocol.deliveries import LOCAL
from perdure.store.open import checked_store
from perdure.store.streams import NewStream
from tests.support.stack import Stack, TemporalServer
from tests.support.talk import Json, Talk, types
from tests.support.waiting import until

AGENTS = "tests.runtime.served:chat"
#: Tables whose rows outlive a session, and those that have none of a session.
KEPT = ("perdure_schema", "deletions", "deleted_keys", "spending", "streams", "stream_items", "stream_producers")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    with quick(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@contextmanager
def quick(directory: Path, **parts: Any) -> Generator[Stack]:
    """A stack whose Temporal deletes executions at once; by default it waits for its own queues, for half a minute."""
    ensure = ("visibility", "transfer")
    config = {f"history.{each}ProcessorEnsureCloseBeforeDelete": "false" for each in ensure}
    temporal = TemporalServer(directory, config)
    try:
        options: dict[str, Any] = {"agents": AGENTS, **parts}
        with Stack(directory, temporal=temporal, provider=True, **options) as stack:
            yield stack
    finally:
        temporal.close()


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk


def rows(stack: Stack, session_id: str) -> dict[str, int]:
    """The rows that are left of a session, by table."""
    url = stack.settings.database
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            listed = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return _counted(connection, listed, session_id, "?")
    with psycopg.connect(url) as connection:
        listed = [name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        return _counted(connection, listed, session_id, "%s")


def _counted(connection: Any, tables: list[str], session_id: str, mark: str) -> dict[str, int]:
    query = f"SELECT COUNT(*) FROM {{}} WHERE session_id = {mark}"
    counted = {
        table: connection.execute(query.format(table), (session_id,)).fetchone()[0]
        for table in tables
        if table not in KEPT
    }
    return {table: count for table, count in counted.items() if count}


async def listed(stack: Stack, session_id: str) -> list[str]:
    """What Temporal lists of a session."""
    client = await stack.client()
    query = f"WorkflowId = '{session_id}' OR WorkflowId STARTS_WITH '{session_id}/'"
    return [each.id async for each in client.list_workflows(query)]


async def delete(talk: Talk) -> Json:
    """Delete the session, and repeat it until there is a receipt."""
    receipt: Json = {}

    async def finished() -> bool:
        answer = await talk.http.delete(f"/v1/sessions/{talk.session_id}")
        assert answer.is_success, answer.text
        receipt.update(answer.json())
        return answer.status_code == 200

    await until(finished, "the receipt")
    return receipt


async def test_nothing_is_left_of_a_session(stack: Stack, talk: Talk) -> None:
    headers = {"idempotency-key": "the first message"}
    created = await talk.http.post("/eve/v1/session", json={"message": "say hello"}, headers=headers)
    talk.session_id, talk.token = created.json()["sessionId"], created.json()["continuationToken"]
    await talk.until_boundary()
    await talk.say('call add {"a": 1, "b": 2} then say three')
    assert len(await listed(stack, talk.session_id)) == 3

    receipt = await delete(talk)

    assert receipt["status"] == "deleted"
    assert (receipt["deleted"]["sessions"], receipt["deleted"]["executions"]) == (1, 3)
    assert receipt["deleted"]["events"] == talk.cursor + 1
    assert rows(stack, talk.session_id) == {}
    assert await listed(stack, talk.session_id) == []
    assert (await talk.http.get(f"/v1/sessions/{talk.session_id}")).status_code == 404
    # Repeated, it is the same receipt; a late retry of an earlier request starts nothing.
    assert await delete(talk) == receipt
    retried = await talk.http.post("/eve/v1/session", json={"message": "say hello"}, headers=headers)
    assert (retried.status_code, retried.json()["code"]) == (410, "session_deleted")
    late = await talk.http.post(
        f"/eve/v1/session/{talk.session_id}", json={"continuationToken": talk.token, "message": "x"}
    )
    assert late.status_code == 404


async def test_a_turn_is_stopped_and_streams_end_first(stack: Stack, talk: Talk) -> None:
    await talk.create("drip 500 words delay 50")
    await talk.until("message.appended")

    async def read() -> list[Json]:
        return [event async for event in talk.events()]

    reading = asyncio.create_task(read())
    receipt = await delete(talk)
    events = await asyncio.wait_for(reading, 30)

    assert receipt["status"] == "deleted"
    assert [event["meta"]["index"] for event in events] == list(range(len(events)))
    assert types(events)[-1] == "session.failed"
    assert "turn.cancelled" in types(events)
    assert rows(stack, talk.session_id) == {}
    assert await listed(stack, talk.session_id) == []


@pytest.mark.postgres
async def test_the_turns_that_a_fork_shares_stay_with_it(tmp_path: Path, postgres_url: str) -> None:
    with quick(tmp_path, database_url=postgres_url) as stack:
        await delete_parent_and_fork(stack)


async def delete_parent_and_fork(stack: Stack) -> None:
    async with stack.talk() as talk, stack.talk() as fork:
        await talk.say("say first")
        await talk.say("say second")
        forked = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 0})
        fork.session_id, fork.token = forked.json()["sessionId"], forked.json()["continuationToken"]

        receipt = await delete(talk)

        assert receipt["deleted"]["handedOver"] > 0
        assert rows(stack, talk.session_id) == {}
        assert await fork.say("say on") == "on"
        assert await fork.say("say again") == "again"
        assert (await delete(fork))["status"] == "deleted"
        assert rows(stack, fork.session_id) == {}
        assert await listed(stack, fork.session_id) == []


async def test_an_operator_deletes_all_sessions_of_a_principal(stack: Stack, talk: Talk) -> None:
    await talk.say("say mine")
    async with stack.talk() as other:
        await other.say("say mine too")
        ids = {talk.session_id, other.session_id}
    note = NewStream("str_1", LOCAL.owner, "notes", "text/plain", [b"hello"])
    async with checked_store(stack.settings.database) as store:
        await store.streams.create(note)

    done = await asyncio.to_thread(
        subprocess.run,
        command("sessions", "delete", "--principal", "local-dev:local-dev"),
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    streams, *sessions = done.stdout.splitlines()
    assert ids <= {line.split()[0] for line in sessions}
    assert all(" deleted: " in line for line in sessions)
    assert all(re.search(r" workflow executions?, .* 1 session$", line) for line in sessions)
    assert streams == "local-dev:local-dev  deleted: 1 stream"
    async with checked_store(stack.settings.database) as store:
        assert await store.streams.find(note.owner, note.path) is None
    for session_id in ids:
        assert rows(stack, session_id) == {}
        assert await listed(stack, session_id) == []


async def test_a_deletion_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    with quick(tmp_path, apis=2) as stack:
        await interrupt(stack)


async def interrupt(stack: Stack) -> None:
    async with stack.talk(1) as talk:
        await talk.create("drip 500 words delay 50")
        await talk.until("message.appended")
        # No worker stops the turn, so this API waits for it, and dies.
        stack.workers[0].kill()
        deleting = asyncio.create_task(talk.http.delete(f"/v1/sessions/{talk.session_id}"))
        await until(lambda: _begun(stack, talk.session_id), "the tombstone")
        stack.apis[1].kill()
        await asyncio.gather(deleting, return_exceptions=True)
        assert rows(stack, talk.session_id)["sessions"] == 1

        stack.start_worker()

        await until(lambda: rows(stack, talk.session_id) == {}, "the rows to go", 60)
        async with stack.talk() as other:
            other.session_id = talk.session_id
            assert (await delete(other))["status"] == "deleted"
        assert await listed(stack, talk.session_id) == []


def _begun(stack: Stack, session_id: str) -> bool:
    with closing(sqlite3.connect(stack.settings.database.removeprefix("sqlite:///"))) as connection:
        return bool(connection.execute("SELECT 1 FROM deletions WHERE session_id = ?", (session_id,)).fetchall())
