"""Tags of sessions: set at their start and later, and looked for."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import Invalid, SessionGone
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork
from perdure.store.values import MOST_TAGS, SessionQuery
from tests.support import given
from tests.support.given import closing, ending, read_session, running

_ALL = SessionQuery()


async def found(store: Store, name: str, text: str, query: SessionQuery = _ALL) -> list[str]:
    page = await store.sessions(replace(query, tag=(name, text)))
    return [row.session_id for row in page.sessions]


async def test_tags_are_changed_one_by_one(empty: Store) -> None:
    await empty.create_session(replace(given.session(), tags={"a": "1", "b": "2"}))

    row = await empty.set_tags("s", {"a": None, "b": "zwei 🧭", "c": 'x","b":"9\0', "none": None})

    assert row.tags == {"b": "zwei 🧭", "c": 'x","b":"9\0'}
    assert (await read_session(empty)).tags == row.tags
    assert (await empty.set_tags("s", dict.fromkeys("abc"))).tags == {}


async def test_a_session_is_found_by_the_whole_text_of_a_tag(empty: Store) -> None:
    await empty.create_session(replace(given.session(), tags={"job": "nightly", "é": "x"}))
    await empty.create_session(replace(given.session("t"), tags={"job": 'nightly" build', "x": '"job":"nightly"'}))
    await empty.create_session(given.session("u"))

    assert await found(empty, "job", "nightly") == ["s"]
    assert await found(empty, "job", 'nightly" build') == ["t"]
    assert await found(empty, "ob", "nightly") == []
    assert await found(empty, "job", "night") == []
    for query in (
        SessionQuery(owner=given.ADA.owner),
        SessionQuery(status="starting"),
        SessionQuery(owner=given.ADA.owner, status="starting"),
    ):
        assert await found(empty, "job", "nightly", query) == ["s"]
    assert await found(empty, "job", "nightly", SessionQuery(status="needs_attention")) == []


async def test_two_who_set_different_tags_at_the_same_time_are_both_heard(store: Store) -> None:
    await asyncio.gather(*(store.set_tags("s", {f"t{number}": "x"}) for number in range(8)))

    assert sorted((await read_session(store)).tags) == [f"t{number}" for number in range(8)]


async def test_a_session_has_only_so_many_tags(store: Store) -> None:
    await store.set_tags("s", {f"t{number}": "x" for number in range(MOST_TAGS)})

    with pytest.raises(Invalid):
        await store.set_tags("s", {"more": "x"})

    assert len((await store.set_tags("s", {"t0": "y"})).tags) == MOST_TAGS
    assert len((await store.set_tags("s", {"more": "x", "t0": None})).tags) == MOST_TAGS


async def test_a_session_that_has_ended_keeps_its_tags_and_takes_more(store: Store) -> None:
    await store.set_tags("s", {"a": "1"})
    await store.commit(closing())

    assert (await store.set_tags("s", {"b": "2"})).tags == {"a": "1", "b": "2"}
    with pytest.raises(SessionGone):
        await store.set_tags("unknown", {"b": "2"})


async def test_a_fork_has_the_tags_of_its_parent(store: Store) -> None:
    await store.set_tags("s", {"a": "1"})
    await store.commit(running())
    await store.commit(ending())

    await store.fork(NewFork("f", "token of f", "s", 0))

    fork = await store.session("f")
    assert fork is not None
    assert fork.tags == {"a": "1"}
