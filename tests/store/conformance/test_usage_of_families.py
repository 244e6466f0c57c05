"""What the descendants of a session have used is counted in every session above them, once."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import Superseded, TurnCancelled
from perdure.protocol.events import Usage
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork
from perdure.store.values import Below, Commit, Hold, InputChanges, SessionChange
from tests.store.conformance.conftest import Database
from tests.store.conformance.test_families import child
from tests.support import given

USED = Usage(input_tokens=10, output_tokens=5, cache_read_tokens=2, cache_write_tokens=1)
NOTHING = Below()


def using(session_id: str, used: Usage = USED, cost: int = 7) -> Commit:
    return Commit(session_id, change=SessionChange(usage=used, cost=cost))


@pytest.fixture
async def family(store: Store) -> Store:
    """`s` with the children `a` and `b`; below `a`, `aa` and below that `aaa`; beside them another root."""
    members = (child("a", "s"), child("b", "s"), child("aa", "s", "a"), child("aaa", "s", "a", "aa"))
    for new in (*members, given.session("other")):
        await store.create_session(new)
    return store


async def below(store: Store, session_id: str) -> Below:
    return (await given.read_session(store, session_id)).below


async def test_what_a_session_uses_is_counted_in_all_sessions_above_it_and_in_no_other(family: Store) -> None:
    await family.commit(using("aaa"))

    for above in ("aa", "a", "s"):
        assert await below(family, above) == Below(USED, 7)
    for beside in ("aaa", "b", "other"):
        assert await below(family, beside) == NOTHING


async def test_the_usage_of_a_session_stays_its_own(family: Store) -> None:
    await family.commit(using("a"))

    root = await given.read_session(family, "s")

    assert (root.usage, root.spent) == (Usage(), USED)
    assert (await given.read_session(family, "a")).usage == USED


async def test_what_several_descendants_use_is_added_up(family: Store) -> None:
    for each in ("a", "b", "aa", "aaa", "aaa"):
        await family.commit(using(each))

    assert await below(family, "s") == Below(USED + USED + USED + USED + USED, 35)
    assert await below(family, "a") == Below(USED + USED + USED, 21)


async def test_the_own_commits_of_a_session_keep_what_was_counted_in_it(family: Store) -> None:
    await family.commit(using("a"))

    await family.commit(using("s"))
    await family.commit(given.running(0))

    root = await given.read_session(family, "s")
    assert (root.usage, root.below.usage, root.spent) == (USED, USED, USED + USED)


async def test_a_commit_without_usage_changes_nothing_above(family: Store) -> None:
    before = await given.read_session(family, "s")

    await family.commit(Commit("a", change=SessionChange(steps=1, usage=Usage())))

    assert await given.read_session(family, "s") == before


async def test_a_repeated_commit_counts_once(family: Store) -> None:
    once = replace(using("aa"), unless=(0, 0, "reply"), records=[given.record()])

    for _ in range(3):
        await family.commit(once)

    assert await below(family, "s") == Below(USED, 7)


async def test_an_attempt_that_has_lost_its_fence_counts_nothing(family: Store) -> None:
    await family.commit(replace(given.raising(1), session_id="aa"))
    await family.commit(replace(given.raising(2), session_id="aa"))

    with pytest.raises(Superseded):
        await family.commit(replace(using("aa"), fence=given.fence(Hold.RELEASE, 1)))
    await family.commit(replace(using("aa"), fence=given.fence(Hold.RELEASE, 2)))

    assert await below(family, "s") == Below(USED, 7)


async def test_a_commit_that_is_rolled_back_counts_nothing(family: Store) -> None:
    await family.commit(given.running(0, "a"))
    await given.cancel(family, "a")

    with pytest.raises(TurnCancelled):
        await family.commit(replace(using("a"), unless_cancelled=0))

    assert await below(family, "s") == NOTHING


@pytest.mark.parametrize("ended", ["a", "aa"])
async def test_usage_that_is_recorded_late_counts_also_after_the_end_of_its_session_or_of_one_above(
    family: Store, ended: str
) -> None:
    await family.commit(given.closing(ended))

    await family.commit(replace(using("aa"), records=[given.record("usage/2")], late=True))

    assert await below(family, "a") == Below(USED, 7)
    assert await below(family, "s") == Below(USED, 7)


async def test_a_root_that_has_ended_counts_too(family: Store) -> None:
    await family.commit(given.closing("s"))

    await family.commit(using("a"))

    root = await given.read_session(family, "s")
    assert (root.status, root.below) == ("completed", Below(USED, 7))


async def test_what_was_used_before_a_turn_is_told_apart(family: Store) -> None:
    await family.commit(given.running(0))
    await family.commit(using("a"))
    assert await below(family, "s") == Below(USED, 7, tokens_before=0, cost_before=0)

    await family.commit(given.ending(0))
    await family.commit(given.running(1))
    await family.commit(using("b"))

    assert await below(family, "s") == Below(USED + USED, 14, tokens_before=15, cost_before=7)


async def test_the_root_counts_although_the_session_between_was_deleted(family: Store, database: Database) -> None:
    database.run("DELETE FROM sessions WHERE session_id = 'aa'")

    await family.commit(using("aaa"))

    assert await below(family, "s") == Below(USED, 7)


async def test_a_deleted_root_stops_no_descendant(family: Store, database: Database) -> None:
    database.run("DELETE FROM sessions WHERE session_id = 's'")

    await family.commit(using("aa"))

    assert await below(family, "a") == Below(USED, 7)


async def test_a_fork_begins_without_what_its_parent_has_spent(family: Store) -> None:
    await family.commit(given.running(0))
    await family.commit(given.ending(0))
    await family.commit(using("a"))

    await family.fork(NewFork("f", "token of f", "s", 0))

    assert await below(family, "f") == NOTHING


async def test_many_commits_of_one_family_at_once_lose_nothing_and_wait_in_no_circle(
    family: Store, other: Store
) -> None:
    """Each session commits 20 times, the deep ones with what they ask and with their end, the others beside them."""
    deep = [f"deep{n}" for n in range(10)]
    for each in deep:
        await family.create_session(child(each, "s", "a", "aa"))

    async def work(store: Store, session_id: str) -> None:
        for _ in range(20):
            await store.commit(using(session_id, cost=1))

    async def die(store: Store, session_id: str) -> None:
        await work(store, session_id)
        asked = given.request(session_id, session_id=session_id)
        await store.commit(Commit(session_id, inputs=InputChanges(opens=[asked])))
        await store.commit(given.closing(session_id))

    await asyncio.gather(
        *(work((family, other)[n % 2], each) for n, each in enumerate(("s", "a", "aa", "b"))),
        *(die((family, other)[n % 2], each) for n, each in enumerate(deep)),
    )

    counted = [(await below(family, each)).cost for each in ("aa", "a", "s")]
    assert counted == [200, 220, 260]
    assert (await below(family, "s")).usage.input_tokens == 2600
