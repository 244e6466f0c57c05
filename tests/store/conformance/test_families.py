"""Who has started a session, the family of a root, and what all of it asks."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perdure.errors import SessionDeleted, SessionGone
from perdure.protocol import names
from perdure.protocol.deliveries import Lineage
from perdure.protocol.events import EVENT_EXPIRED, EventType, NewEvent
from perdure.store.base import Store
from perdure.store.inputs import InputQuery
from perdure.store.lifecycle import Keep
from perdure.store.values import Commit, NewSession, SessionChange, SessionPage, SessionQuery, ShownStatus
from tests.store.conformance.conftest import Database
from tests.support import given
from tests.support.given import answer, answering, chooses


def child(session_id: str, *above: str) -> NewSession:
    """A session that the last one of `above` has started; the first one is the root."""
    lineage = Lineage(
        session_id=above[-1],
        root_session_id=above[0],
        turn=0,
        step=1,
        call_id=f"call of {session_id}",
        name="helper",
        depth=len(above),
    )
    return replace(given.session(session_id), mode="task", parent=lineage.model_dump(mode="json"))


@pytest.fixture
async def family(store: Store) -> Store:
    """`s` with the children `a` and `b`, and `aa` below `a`; beside them another root with a child."""
    for new in (child("a", "s"), child("b", "s"), child("aa", "s", "a"), given.session("other"), child("o", "other")):
        await store.create_session(new)
    return store


def ids(page: SessionPage) -> Sequence[str]:
    return [row.session_id for row in page.sessions]


async def test_a_session_knows_its_parent_and_its_root(family: Store) -> None:
    root, first, second = [await given.read_session(family, each) for each in ("s", "a", "aa")]

    assert (root.parent_id, root.root_id) == (None, None)
    assert (first.parent_id, first.root_id) == ("s", "s")
    assert (second.parent_id, second.root_id) == ("a", "s")
    assert second.parent == child("aa", "s", "a").parent


async def test_the_children_of_a_session_are_listed_without_theirs(family: Store) -> None:
    assert set(ids(await family.sessions(SessionQuery(parent="s")))) == {"a", "b"}
    assert ids(await family.sessions(SessionQuery(parent="a"))) == ["aa"]
    assert ids(await family.sessions(SessionQuery(parent="aa"))) == []
    assert ids(await family.sessions(SessionQuery(parent="unknown"))) == []


async def test_children_come_newest_first_and_in_pages(store: Store) -> None:
    for n in range(7):
        await store.create_session(child(f"c{n}", "s"))

    page = await store.sessions(SessionQuery(parent="s", limit=3))
    seen = list(page.sessions)
    while page.next_cursor:
        page = await store.sessions(SessionQuery(parent="s", limit=3, cursor=page.next_cursor))
        seen += page.sessions

    ages = [(row.created_at, row.session_id) for row in seen]
    assert ages == sorted(set(ages), reverse=True)
    assert {row.session_id for row in seen} == {f"c{n}" for n in range(7)}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (SessionQuery(owner=given.ADA.owner), {"a", "b"}),
        (SessionQuery(owner=given.BOB.owner), set[str]()),
        (SessionQuery(agent="echo", mode="task"), {"a", "b"}),
        (SessionQuery(mode="conversation"), set[str]()),
        (SessionQuery(status="starting"), {"a"}),
        (SessionQuery(status="needs_attention"), {"b"}),
    ],
)
async def test_children_are_filtered_like_all_sessions(family: Store, query: SessionQuery, found: set[str]) -> None:
    await given.attend(family, session_id="b")

    assert set(ids(await family.sessions(replace(query, parent="s")))) == found


@pytest.mark.parametrize("status", ["completed", "needs_attention"])
async def test_an_ended_child_is_still_listed(family: Store, status: ShownStatus) -> None:
    await family.commit(given.closing("a"))
    await given.attend(family, session_id="b")

    assert len(ids(await family.sessions(SessionQuery(parent="s", status=status)))) == 1


async def test_the_family_of_a_root_is_all_below_it_in_pages(family: Store) -> None:
    first = await family.family("s", limit=2)
    second = await family.family("s", cursor=first.next_cursor, limit=2)

    assert [len(first.sessions), len(second.sessions), second.next_cursor] == [2, 1, None]
    ages = [(row.created_at, row.session_id) for row in (*first.sessions, *second.sessions)]
    assert ages == sorted(ages)
    assert {*ids(first), *ids(second)} == {"a", "b", "aa"}


async def test_only_a_root_has_a_family(family: Store) -> None:
    assert ids(await family.family("a")) == []
    assert ids(await family.family("unknown")) == []


async def test_what_a_family_asks_is_found_by_its_root(family: Store) -> None:
    for n, asks in enumerate(("aa", "s", "b", "other", "o", "s")):
        await family.commit(given.parking(f"r{n}", session_id=asks))

    first = await family.inputs(InputQuery(root="s", limit=3))
    second = await family.inputs(InputQuery(root="s", limit=3, cursor=first.next_cursor))

    assert [row.request.request_id for row in (*first.rows, *second.rows)] == ["r0", "r1", "r2", "r5"]
    assert second.next_cursor is None
    assert [row.request.request_id for row in (await family.inputs(InputQuery(session_id="s"))).rows] == ["r1", "r5"]


async def test_what_a_family_asks_is_filtered_like_all_requests(family: Store) -> None:
    await family.commit(given.parking("r", session_id="a"))
    await family.commit(given.parking("q", session_id="b"))
    await answer(
        family,
        replace(answering(("r", chooses("approve"))), session_id="a", delivery=given.delivery("d", session_id="a")),
    )

    async def found(query: InputQuery) -> list[str]:
        return [row.request.request_id for row in (await family.inputs(replace(query, root="s"))).rows]

    assert await found(InputQuery()) == ["q"]
    assert await found(InputQuery(status="answered")) == ["r"]
    assert await found(InputQuery(status=None)) == ["r", "q"]
    assert await found(InputQuery(kind="question")) == []
    assert await found(InputQuery(agent="another")) == []


async def test_what_older_code_writes_has_no_family(store: Store, database: Database) -> None:
    database.run(
        "INSERT INTO sessions (session_id, agent, mode, status, owner, principal, capabilities, created_at, updated_at)"
        " SELECT 'old', agent, mode, status, owner, principal, capabilities, created_at, updated_at FROM sessions"
        " WHERE session_id = 's'"
    )
    await store.commit(given.parking("r", session_id="old"))
    database.run("UPDATE inputs SET root_id = NULL")

    row = await given.read_session(store, "old")

    assert (row.parent, row.parent_id, row.root_id) == (None, None, None)
    assert ids(await store.family("old")) == []
    assert [row.request.request_id for row in (await store.inputs(InputQuery(root="old"))).rows] == ["r"]


# --- deletions ----------------------------------------------------------------------------------------------


async def delete(store: Store, *session_ids: str) -> None:
    """Delete these sessions, which are parts of deletions in this order."""
    for session_id in session_ids:
        await store.begin_deletion(session_id)
        await store.commit(given.closing(session_id))
        while not await store.purge(session_id, 500):
            pass
        await store.finish_deletion(session_id, executions=2)


@pytest.mark.parametrize("limit", [1, 500])
async def test_a_session_is_not_purged_before_its_children_have_their_tombstones(
    family: Store, database: Database, limit: int
) -> None:
    await family.begin_deletion("s")
    await family.commit(given.closing())

    while not await family.purge("s", limit):
        pass

    assert await family.session("s") is None
    assert await family.unfinished_parts("s", 10) == ["a", "b"]
    # The child of a child gets one when that one is deleted.
    assert database.run("SELECT session_id, part_of FROM deletions ORDER BY 1") == [("a", "s"), ("b", "s"), ("s", None)]


async def test_the_deletion_of_a_session_ends_when_those_of_its_descendants_have(family: Store) -> None:
    await delete(family, "s")
    unfinished = await family.deletion("s")
    await delete(family, "a", "b")
    between = await family.finish_deletion("s", executions=2)
    await delete(family, "aa")
    for part in ("a", "s"):
        await family.finish_deletion(part, executions=2)
    finished = await family.deletion("s")

    assert unfinished is not None
    assert between is not None
    assert finished is not None
    assert [each.finished_at is None for each in (unfinished, between, finished)] == [True, True, False]
    assert (unfinished.counts["sessions"], between.counts["sessions"]) == (1, 3)
    assert (finished.counts["sessions"], finished.counts["executions"]) == (4, 8)
    # Repeating changes nothing.
    assert await family.finish_deletion("s", executions=2) == finished
    assert (await given.read_session(family, "other")).status == "starting"
    assert (await given.read_session(family, "o")).status == "starting"


async def test_who_finishes_a_deletion_finishes_its_parts(family: Store, database: Database) -> None:
    await delete(family, "s")
    together = await family.unfinished_deletions(10)
    # As older code does.
    database.run("UPDATE deletions SET finished_at = requested_at WHERE session_id = 's'")

    assert together == ["s"]
    assert await family.unfinished_deletions(10) == ["a", "b"]


async def test_a_child_that_was_being_deleted_becomes_a_part(family: Store) -> None:
    await family.begin_deletion("a")

    await delete(family, "s", "a", "b", "aa")
    for whole in ("a", "s"):
        await family.finish_deletion(whole, executions=2)

    finished = await family.deletion("s")
    assert finished is not None
    assert finished.finished_at is not None
    assert finished.counts["sessions"] == 4


@pytest.mark.parametrize("end", ["tombstone", "close", "purge"])
async def test_no_child_is_begun_for_a_session_that_has_ended_or_is_deleted(store: Store, end: str) -> None:
    if end == "close":
        await store.commit(given.closing())
    else:
        await store.begin_deletion("s")
    if end == "purge":
        await delete(store, "s")

    with pytest.raises(SessionGone):
        await store.create_session(child("late", "s"), given.delivery(session_id="late"))

    assert await store.session("late") is None
    assert await store.deliveries("late", ["d"]) == []


async def test_a_deleted_child_is_not_begun_again(family: Store) -> None:
    await delete(family, "b")

    with pytest.raises(SessionDeleted):
        await family.create_session(child("b", "s"), given.delivery(session_id="b"))

    assert await family.session("b") is None


async def test_a_child_that_exists_may_be_begun_again_while_its_parent_is_deleted(store: Store) -> None:
    first = await store.create_session(child("c", "s"), given.delivery(session_id="c"))
    await store.begin_deletion("s")

    again = await store.create_session(child("c", "s"), given.delivery(session_id="c"))

    assert first is not None
    assert again is not None
    assert (again.fresh, again.delivery) == (False, first.delivery)


async def test_a_child_that_races_the_deletion_of_its_parent_is_refused_or_deleted(store: Store, other: Store) -> None:
    async def create(n: int, parent: str) -> bool:
        try:
            await other.create_session(child(f"{parent}-{n}", parent), given.delivery(session_id=f"{parent}-{n}"))
        except SessionGone:
            return False
        return True

    async def remove(parent: str) -> None:
        await store.begin_deletion(parent)
        await store.commit(given.closing(parent))
        while not await store.purge(parent, 500):
            pass

    for n in range(5):
        await store.create_session(given.session(f"p{n}"))
        *created, _ = await asyncio.gather(*(create(m, f"p{n}") for m in range(8)), remove(f"p{n}"))

        wanted = [f"p{n}-{m}" for m, begun in enumerate(created) if begun]
        assert await store.unfinished_parts(f"p{n}", 50) == wanted


# --- retention ----------------------------------------------------------------------------------------------


def result() -> NewEvent:
    return NewEvent(type=EventType.RESULT_COMPLETED, key=names.turn_key(0, "s0/result"), data={"result": 42}, turn=0)


@pytest.mark.parametrize("keep", [Keep(messages=-60.0), Keep(records=-60.0)])
async def test_a_result_is_kept_until_the_parent_has_read_it(store: Store, keep: Keep) -> None:
    ended = replace(given.closing("c"), change=SessionChange(status="completed", turns=1))
    await store.create_session(child("c", "s"))
    await store.commit(Commit("c", records=[given.record(of="c")], events=[result()]))
    await store.commit(ended)
    report = names.delivery_of_child("c")

    async def left() -> tuple[int, int | None]:
        await store.expire(keep, None, 10)
        types = [event.type for event in await given.everything(store, "c")]
        return len(await store.records("c")), types.count(EventType.RESULT_COMPLETED)

    assert [row.delivery_id for row in await store.unread("s")] == [report]
    assert await left() == (1, 1)
    await store.commit(given.consuming(report))
    assert 0 in await left()


async def test_the_output_of_a_child_expires_with_the_messages_of_its_parent(store: Store) -> None:
    completed = NewEvent(
        type=EventType.SUBAGENT_COMPLETED, key=names.step_key(0, 0, "child/c"), data={"output": "Found it"}, turn=0
    )
    end = given.event("t0/end")
    await store.commit(Commit("s", events=[completed, end], change=SessionChange(status="waiting", turns=2)))

    await store.expire(Keep(messages=-60.0), None, 10)

    assert [event.type for event in await given.everything(store)] == [EVENT_EXPIRED, end.type]


async def test_a_result_that_nobody_reads_any_more_is_not_kept(store: Store) -> None:
    await store.create_session(child("c", "s"))
    await store.commit(Commit("c", records=[given.record(of="c")]))
    await store.commit(given.closing("c"))
    await store.commit(given.closing("s"))

    await store.expire(Keep(records=-60.0), None, 10)

    assert await store.records("c") == []
