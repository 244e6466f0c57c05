"""Who has started a session, the family of a root, and what all of it asks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from perdure.protocol.deliveries import Lineage
from perdure.store.base import Store
from perdure.store.values import InputQuery, NewSession, SessionPage, SessionQuery, ShownStatus
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
