"""What accounts have spent, and what running calls have reserved of it."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import BudgetReached, Superseded
from perdure.store.base import Store
from perdure.store.values import Commit, Hold, Reservation, Spending
from tests.store.conformance.conftest import Database
from tests.support import given

LIMIT = 100


def reserving(tokens: int, *, session_id: str = "s", turn: int = 0, generation: int = 1, cost: int = 0) -> Commit:
    reservation = Reservation("ada", tokens, cost, most_tokens=LIMIT, most_cost=LIMIT)
    return replace(given.raising(generation, turn=turn), session_id=session_id, reserve=reservation)


def settling(tokens: int, *, session_id: str = "s", turn: int = 0, generation: int = 1) -> Commit:
    fence = given.fence(Hold.RELEASE, generation, turn=turn)
    return Commit(session_id, fence=fence, spends=Spending("ada", tokens, 0))


async def fits(store: Store, tokens: int, **place: int) -> bool:
    """Whether another session may reserve so much. It does not keep what it gets."""
    try:
        await store.commit(reserving(tokens, session_id="probe", turn=9, **place))
    except BudgetReached:
        return False
    await store.commit(Commit("probe", close_turn=9))
    return True


@pytest.fixture(autouse=True)
async def _sessions(store: Store) -> None:
    await store.create_session(given.session("probe"))
    await store.create_session(given.session("other"))


async def test_what_is_reserved_and_what_is_spent_is_not_left(store: Store) -> None:
    await store.commit(reserving(60))
    assert await fits(store, 40)
    assert not await fits(store, 41)

    await store.commit(settling(25))

    assert await fits(store, 75)
    assert not await fits(store, 76)


async def test_costs_have_a_limit_of_their_own(store: Store) -> None:
    await store.commit(reserving(1, cost=60))

    with pytest.raises(BudgetReached) as reached:
        await store.commit(reserving(1, session_id="other", cost=41))

    assert reached.value.details == {"unit": "cost", "used": 0, "reserved": 60, "wanted": 41, "limit": LIMIT}


async def test_what_does_not_fit_writes_nothing(store: Store) -> None:
    with pytest.raises(BudgetReached):
        await store.commit(replace(reserving(101), events=[given.event("a")], records=[given.record()]))

    assert await given.everything(store) == []
    with pytest.raises(Superseded):
        await store.commit(given.keeping(1))


async def test_a_newer_attempt_takes_over_what_a_dead_one_has_reserved(store: Store) -> None:
    await store.commit(reserving(90, generation=1))

    await store.commit(reserving(95, generation=2))

    assert not await fits(store, 6)
    assert await fits(store, 5)


async def test_an_attempt_that_has_lost_its_fence_settles_nothing(store: Store) -> None:
    await store.commit(reserving(90, generation=1))
    await store.commit(reserving(90, generation=2))

    with pytest.raises(Superseded):
        await store.commit(settling(50, generation=1))

    assert await fits(store, 10)


@pytest.mark.parametrize("ending", [Commit("s", close_turn=0), given.closing()])
async def test_the_end_of_a_turn_or_a_session_releases_what_its_attempts_have_reserved(
    store: Store, ending: Commit
) -> None:
    await store.commit(reserving(100))
    assert not await fits(store, 1)

    await store.commit(ending)

    assert await fits(store, 100)


async def test_an_attempt_can_release_what_it_has_reserved_and_keep_its_fence(store: Store) -> None:
    await store.commit(reserving(100))

    await store.commit(Commit("s", fence=given.fence(Hold.KEEP, 1), reserve=Reservation("ada", 0, 0)))

    assert await fits(store, 100)
    await store.commit(given.keeping(1))


async def test_a_repeated_commit_spends_once(store: Store) -> None:
    once = Commit("s", unless=(0, 0, "reply"), records=[given.record()], spends=Spending("ada", 70, 0))

    for _ in range(3):
        await store.commit(once)

    assert await fits(store, 30)
    assert not await fits(store, 31)


async def test_accounts_are_apart(store: Store) -> None:
    await store.commit(replace(reserving(100), reserve=Reservation("bob", 100, 0, most_tokens=100)))

    assert await fits(store, 100)


async def test_many_sessions_at_once_never_reserve_more_than_there_is(store: Store, other: Store) -> None:
    for number in range(30):
        await store.create_session(given.session(f"s{number}"))

    done = await asyncio.gather(
        *((store, other)[number % 2].commit(reserving(10, session_id=f"s{number}")) for number in range(30)),
        return_exceptions=True,
    )

    assert sum(isinstance(each, BudgetReached) for each in done) == 20
    assert sum(not isinstance(each, BaseException) for each in done) == 10


async def test_older_code_takes_the_fence_and_the_reservation_ends_with_it(store: Store, database: Database) -> None:
    await store.commit(reserving(100))
    database.run("UPDATE fences SET attempt = 2, generation = 2 WHERE session_id = 's'")

    await store.commit(Commit("s", fence=given.fence(Hold.RELEASE, 2)))

    assert await fits(store, 100)
