"""Sessions that are deleted: what is left, what forks keep, and what a late request meets."""

import asyncio

import pytest

from perdure.errors import SessionDeleted, SessionGone, SessionNotFound, Superseded, Unavailable
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork, NewRemoteCall
from perdure.store.values import Commit, NewCheckpoint, SlotWrite
from tests.store.conformance.conftest import OF_NO_SESSION, Database
from tests.store.conformance.test_forks import fork, owners, play
from tests.support import given
from tests.support.given import opening


async def purge(store: Store, session_id: str = "s", limit: int = 500) -> int:
    """Delete everything that is left; returns the number of transactions."""
    for number in range(1, 200):
        if await store.purge(session_id, limit):
            return number
    raise AssertionError("it never ends")


async def delete(store: Store, session_id: str = "s", limit: int = 500) -> int:
    assert await store.begin_deletion(session_id) is not None
    await store.commit(given.closing(session_id))
    return await purge(store, session_id, limit)


def left(database: Database, session_id: str = "s") -> dict[str, int]:
    """The rows of the session that are left, by table."""
    tables = [table for table in database.tables() if table not in OF_NO_SESSION]
    counted = {
        table: database.run(f"SELECT COUNT(*) FROM {table} WHERE session_id = '{session_id}'")[0][0]  # pyright: ignore[reportArgumentType]
        for table in tables
    }
    return {table: count for table, count in counted.items() if count}


async def busy(store: Store) -> None:
    """A session with rows in every table."""
    for turn in range(5):
        await play(store, turn, cart=turn)
    await store.accept(given.delivery("d", key="k"))
    await store.commit(opening("r"))
    await store.begin_remote_call(NewRemoteCall("s", "subagent-call:away:c", {}, token_hash="hash"))
    await store.commit(given.raising(1, turn=5))
    failed = NewEvent(type=EventType.TURN_FAILED, key="t5/failed", turn=5, data={"code": "X", "message": "It failed."})
    await store.commit(Commit("s", events=[failed], checkpoint=NewCheckpoint("chk_1", 5, 0)))


@pytest.mark.parametrize("limit", [500, 1, 3])
async def test_no_row_of_a_deleted_session_is_left(store: Store, database: Database, limit: int) -> None:
    await store.create_session(given.session("other"))
    await play(store, 0, "other")
    before = left(database, "other")
    await busy(store)
    # One that is not settled is kept: somebody waits for it.
    database.run("INSERT INTO callbacks (session_id, settled) VALUES ('s', 'delivered')")
    database.run(
        "INSERT INTO runs (session_id, workflow_name, owner, status, started_at) VALUES ('s', 'r', 'o', 'active', '')"
    )
    database.run("INSERT INTO instances (token_hash, number, session_id) VALUES ('named', 0, 's')")
    assert len(left(database)) == len(database.tables()) - len(OF_NO_SESSION)

    await delete(store, limit=limit)

    assert left(database) == {}
    assert left(database, "other") == before
    assert await store.session("s") is None
    finished = await store.finish_deletion("s", executions=7)
    assert finished is not None
    assert finished.finished_at is not None
    # One delivery, five turns with a record each.
    counts = finished.counts
    assert (counts["sessions"], counts["records"], counts["deliveries"], counts["inputs"]) == (1, 5, 1, 1)
    assert (counts["slots"], counts["slotVersions"], counts["deadLetters"], counts["executions"]) == (1, 5, 1, 7)
    # Repeating changes nothing.
    assert await store.begin_deletion("s") == finished
    assert await store.finish_deletion("s", executions=0) == finished
    assert await store.purge("s", 1)


async def test_a_session_that_has_not_ended_is_not_deleted(store: Store) -> None:
    await busy(store)
    await store.begin_deletion("s")

    with pytest.raises(Unavailable):
        await store.purge("s", 500)

    # But its token is gone, and it is not forked any more.
    assert await store.route("token of s") is None
    with pytest.raises(SessionNotFound):
        await store.fork(NewFork("f", "t", "s", 0))
    assert await store.unfinished_deletions(10) == ["s"]


async def test_nothing_is_begun_for_a_session_that_never_was(store: Store) -> None:
    assert await store.begin_deletion("unknown") is None
    assert await store.unfinished_deletions(10) == []


async def test_a_worker_that_still_writes_gets_nothing_in(store: Store, database: Database) -> None:
    await busy(store)
    await store.begin_deletion("s")
    await store.commit(given.closing())

    for stage in range(5):
        with pytest.raises((Superseded, SessionGone)):
            await store.commit(Commit("s", records=[given.record(turn=9)], events=[given.event("late")]))
        done = await store.purge("s", 4)
        assert done == (stage == 99)
    await purge(store)
    with pytest.raises(SessionGone):
        await store.commit(Commit("s", slots=[SlotWrite("cart", {})]))
    assert left(database) == {}


async def test_a_late_retry_does_not_start_the_session_again(store: Store, database: Database) -> None:
    first = given.delivery("d1", session_id="t", key="begin")
    await store.create_session(given.session("t"), first)
    await delete(store, "t")
    again = given.delivery("d2", session_id="u", key="begin")

    with pytest.raises(SessionDeleted):
        await store.create_session(given.session("u"), again)
    with pytest.raises(SessionDeleted):
        await store.first(again)

    assert left(database, "u") == {}
    # A key is one of its owner.
    other = given.delivery("d3", session_id="u", key="begin", owner=given.BOB.owner)
    assert await store.create_session(given.session("u", who=given.BOB), other) is not None


async def test_old_tombstones_are_forgotten(store: Store, database: Database) -> None:
    await store.accept(given.delivery("d", key="k"))
    await delete(store)

    assert await store.forget_deletions(0, 10) == 0
    await store.finish_deletion("s", executions=0)
    assert await store.forget_deletions(3600, 10) == 0
    assert await store.forget_deletions(-3600, 10) == 1

    assert await store.deletion("s") is None
    assert database.run("SELECT 1 FROM deleted_keys") == []


@pytest.mark.parametrize("limit", [500, 2, 1])
async def test_forks_keep_what_they_share_with_a_deleted_parent(store: Store, database: Database, limit: int) -> None:
    for turn in range(6):
        await play(store, turn, cart=turn)
    for turn in (0, 2, 4):
        await fork(store, turn, to=f"f{turn}")
        await play(store, turn + 1, f"f{turn}", cart=90 + turn)
    await fork(store, 3, parent="f4", to="g")
    names = ("f0", "f2", "f4", "g")
    before = {name: [(each.turn, each.key, each.body) for each in await store.records(name)] for name in names}
    assert await store.begin_deletion("s") is not None
    await store.commit(given.closing())

    done = False
    while not done:
        done = await store.purge("s", limit)
        # Also between two transactions.
        after = {name: [(each.turn, each.key, each.body) for each in await store.records(name)] for name in names}
        assert after == before

    assert left(database) == {}
    deletion = await store.deletion("s")
    assert deletion is not None
    assert (deletion.counts["handedOver"], deletion.counts["records"]) == (5, 1)
    heir, other = await given.read_session(store, "f4"), await given.read_session(store, "f2")
    if limit == 500:
        assert (heir.forked_from, heir.forked_turns) == (None, 0)
        assert (other.forked_from, other.forked_turns) == ("f4", 3)
    # The state of that time is still known.
    await fork(store, 1, parent="f4", to="h")
    assert (await store.slots("h", ["cart"]))["cart"].value == {"n": 1}
    assert await owners(store, "h") == ["s", "s"]
    for name in ("f4", "f2", "f0", "g", "h"):
        await delete(store, name, limit)
        assert left(database, name) == {}
    assert database.run("SELECT session_id FROM records") == []
    assert database.run("SELECT session_id FROM slot_versions") == []


async def test_a_fork_between_two_others_can_be_deleted(store: Store, database: Database) -> None:
    for turn in range(3):
        await play(store, turn)
    await fork(store, 1)
    for turn in (2, 3):
        await play(store, turn, "f")
    await fork(store, 3, parent="f", to="g")
    await fork(store, 0, parent="f", to="h")

    await delete(store, "f")

    assert await owners(store, "g") == ["s", "s", "f", "f"]
    assert await owners(store, "h") == ["s"]
    assert (await given.read_session(store, "g")).forked_from == "s"
    assert (await given.read_session(store, "h")).forked_from == "s"
    assert left(database, "f") == {}
    await delete(store, "s")
    assert await owners(store, "g") == ["s", "s", "f", "f"]
    assert await owners(store, "h") == ["s"]


async def test_a_reader_in_the_middle_of_the_log_finds_its_end_and_no_gap(store: Store) -> None:
    await busy(store)
    await store.begin_deletion("s")
    await store.commit(given.closing())
    before = await given.everything(store)

    while not await store.purge("s", 1):
        left_over = await given.everything(store)
        assert left_over == before[: len(left_over)]
    assert await given.everything(store) == []


async def test_processes_that_delete_one_session_together_count_each_row_once(store: Store, other: Store) -> None:
    for turn in range(30):
        await play(store, turn)
    await store.begin_deletion("s")
    await store.commit(given.closing())

    await asyncio.gather(purge(store, limit=2), purge(other, limit=3), purge(store, limit=1))

    deletion = await store.deletion("s")
    assert deletion is not None
    assert (deletion.counts["sessions"], deletion.counts["records"], deletion.counts["events"]) == (1, 30, 31)


async def test_a_fork_that_meets_a_deletion_has_all_of_its_past_or_is_refused(store: Store, other: Store) -> None:
    for number in range(8):
        session_id, to = f"p{number}", f"f{number}"
        await store.create_session(given.session(session_id))
        for turn in range(3):
            await play(store, turn, session_id)

        async def deleted(session_id: str = session_id) -> None:
            await other.begin_deletion(session_id)
            await other.commit(given.closing(session_id))
            await purge(other, session_id, limit=2)

        forked, _ = await asyncio.gather(fork(store, 1, parent=session_id, to=to), deleted(), return_exceptions=True)

        if isinstance(forked, BaseException):
            assert isinstance(forked, SessionNotFound)
            assert await store.session(to) is None
        else:
            assert await owners(store, to) == [session_id] * 2
