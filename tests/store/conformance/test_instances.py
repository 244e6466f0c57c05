"""The sessions that a name has had: their numbers, and what deletions leave of them."""

import asyncio
from dataclasses import replace

from perdure.errors import TokenConflict
from perdure.store.base import Store
from perdure.store.values import Commit, Instance, SessionChange
from tests.support import given
from tests.support.waiting import until

NAME = "token"


async def start(store: Store, session_id: str) -> None:
    await store.create_session(replace(given.session(session_id, token=NAME), named=True))


async def end(store: Store, session_id: str) -> None:
    await store.commit(Commit(session_id, change=SessionChange(status="completed"), close=True))


async def delete(store: Store, session_id: str) -> None:
    await store.begin_deletion(session_id)
    await until(lambda: store.purge(session_id, 100))


async def test_the_sessions_of_a_name_are_numbered_in_their_order(store: Store) -> None:
    for session_id in ("first", "second", "third"):
        await start(store, session_id)
        await end(store, session_id)

    assert await store.instance(NAME) == Instance(2, "third")
    assert await store.instance(NAME, 1) == Instance(1, "second")
    assert await store.instance(NAME, 3) is None
    assert await store.number_of("second") == 1


async def test_of_sessions_that_begin_at_once_one_gets_the_name(store: Store) -> None:
    done = await asyncio.gather(*(start(store, f"s{number}") for number in range(8)), return_exceptions=True)

    assert [type(each) for each in done if each is not None] == [TokenConflict] * 7
    found = await store.instance(NAME)
    assert found is not None
    assert found.number == 0


async def test_a_session_is_numbered_once(store: Store) -> None:
    await store.create_session(given.session("old", token=NAME))

    await asyncio.gather(*(store.name_session(NAME, "old") for _ in range(8)))

    assert await store.instance(NAME) == Instance(0, "old")
    assert await store.instance(NAME, 1) is None


async def test_a_number_does_not_come_again_when_its_session_is_deleted(store: Store) -> None:
    await start(store, "first")
    await end(store, "first")
    await delete(store, "first")
    after_deletion = await store.instance(NAME)

    await start(store, "second")

    assert after_deletion == Instance(0, None)
    assert await store.instance(NAME, 0) == Instance(1, "second")


async def test_a_deletion_leaves_nothing_of_an_older_session(store: Store) -> None:
    for session_id in ("first", "second"):
        await start(store, session_id)
        await end(store, session_id)

    await delete(store, "first")

    assert await store.instance(NAME, 0) == Instance(1, "second")


async def test_a_new_session_wakes_those_who_wait_for_its_name(store: Store, other: Store) -> None:
    async with store.watch(NAME) as here, other.watch(NAME) as there:
        await start(store, "first")

        assert await here.changed(30)
        assert await there.changed(30)
