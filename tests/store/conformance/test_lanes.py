"""Lanes belong to a session: they are no sessions of their own in lists, and end and go with it."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import SessionDeleted, SessionGone, TokenConflict
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork
from perdure.store.values import Lane, LaneSettings, NewSession, SessionQuery
from tests.support import given


def a_lane(session_id: str = "l", name: str = "cron") -> NewSession:
    return replace(given.session(session_id), token_hash=f"lane/s/{name}", lane=name, lane_of="s")


async def names_of(store: Store, session_id: str = "s") -> list[str]:
    return [each.name for each in await store.lanes(session_id)]


async def test_a_lane_is_found_with_its_session_and_is_in_no_list(store: Store) -> None:
    await store.create_session(a_lane(), None)

    assert await store.lanes("s") == [Lane("l", "cron", ended=False, events=0)]
    main, lane = await given.read_session(store), await given.read_session(store, "l")
    assert (main.lane, main.lane_of) == ("main", None)
    assert (lane.lane, lane.lane_of, lane.parent) == ("cron", "s", None)
    for query in (
        SessionQuery(),
        SessionQuery(owner=main.principal.owner),
        SessionQuery(status="starting"),
        SessionQuery(parent="s"),
    ):
        assert "l" not in {each.session_id for each in (await store.sessions(query)).sessions}


async def test_a_session_without_lanes_knows_none(store: Store) -> None:
    assert await store.lanes("s") == []
    assert (await given.read_session(store)).lane is None


async def test_a_fork_is_a_lane_with_what_was_said(store: Store) -> None:
    await store.commit(given.running())
    await store.commit(given.ending())

    await store.fork(NewFork("l", "lane/s/cron", "s", 0, lane="cron"))

    assert await names_of(store) == ["cron"]
    lane = await given.read_session(store, "l")
    assert (lane.lane, lane.lane_of, lane.forked_from, lane.turns) == ("cron", "s", "s", 1)
    with pytest.raises(TokenConflict):
        await store.fork(NewFork("m", "lane/s/cron", "s", 0, lane="cron"))
    assert await names_of(store) == ["cron"]


async def test_of_many_that_begin_a_lane_one_does(store: Store, other: Store) -> None:
    async def begin(number: int) -> bool:
        try:
            await (store if number % 2 else other).create_session(a_lane(f"l{number}"), None)
        except TokenConflict:
            return False
        return True

    assert sum(await asyncio.gather(*map(begin, range(10)))) == 1
    assert await names_of(store) == ["cron"]


async def test_the_end_of_a_session_is_delivered_to_its_lanes(store: Store) -> None:
    await store.create_session(a_lane(), None)
    await store.accept(given.delivery("d", session_id="l"))
    await store.create_session(a_lane("m", "heartbeat"), None)
    await store.commit(given.closing("m"))

    await store.commit(given.closing())

    waiting = await store.unread("l")
    assert [(each.delivery_id, each.kind) for each in waiting] == [("d", "message"), ("dlv_l_end", "reset")]
    assert await store.unread("m") == []
    with pytest.raises(SessionGone):
        await store.create_session(a_lane("n", "subagent"), None)


async def test_a_lane_does_not_begin_while_its_session_is_deleted(store: Store) -> None:
    await store.create_session(a_lane(), None)
    await store.begin_deletion("s")

    while not await store.delete_children("s", 10):
        pass

    assert await store.unfinished_parts("s", 10) == ["l"]
    with pytest.raises((SessionGone, SessionDeleted)):
        await store.create_session(a_lane("m", "heartbeat"), None)


async def test_a_session_that_ends_while_a_lane_begins_leaves_none_that_lives(store: Store, other: Store) -> None:
    async def begin() -> None:
        try:
            await other.create_session(a_lane(), None)
        except SessionGone:
            return

    await asyncio.gather(store.commit(given.closing()), begin())

    for lane in await store.lanes("s"):
        assert [each.kind for each in await store.unread(lane.session_id)] == ["reset"]


async def test_a_lane_that_has_ended_often_ends_with_its_session_all_the_same(store: Store) -> None:
    for number in range(101):
        await store.create_session(a_lane(f"l{number:03}"), None)
        await store.commit(given.closing(f"l{number:03}"))
    await store.create_session(a_lane("last"), None)

    assert "last" in {each.session_id for each in await store.lanes("s")}
    await store.commit(given.closing())

    assert [each.kind for each in await store.unread("last")] == ["reset"]


async def test_a_lane_does_not_begin_as_a_fork_of_a_session_that_is_deleted(store: Store) -> None:
    await store.commit(given.running())
    await store.commit(given.ending())
    await store.begin_deletion("s")

    with pytest.raises(SessionGone):
        await store.fork(NewFork("l", "lane/s/cron", "s", 0, lane="cron"))


async def test_what_two_set_for_one_lane_at_once_both_counts(store: Store, other: Store) -> None:
    await asyncio.gather(
        store.set_lane("s", "cron", {"mode": "collect"}),
        other.set_lane("s", "cron", {"cap": 3}),
        store.set_lane("s", "main", {"overflow": "drop_oldest"}),
    )

    set_now = await store.lane_settings("s")
    assert set_now == LaneSettings("echo", {"cron": {"mode": "collect", "cap": 3}, "main": {"overflow": "drop_oldest"}})
    # Twice is once, and what a newer build has set stays.
    await store.set_lane("s", "cron", {"cap": 3, "priority": 9})
    await store.set_lane("s", "cron", {"mode": None, "cap": 3})
    assert (await store.set_lane("s", "main", {"overflow": None})).lanes == {"cron": {"cap": 3, "priority": 9}}


async def test_nothing_is_set_for_a_session_that_has_ended_or_is_gone(store: Store) -> None:
    await store.set_lane("s", "main", {"cap": 3})
    await store.commit(given.closing())

    for each in ("s", "unknown"):
        with pytest.raises(SessionGone):
            await store.set_lane(each, "main", {"cap": 4})

    known = await store.lane_settings("s")
    assert known is not None
    assert known.lanes == {"main": {"cap": 3}}
    assert await store.lane_settings("unknown") is None
