"""How many deliveries may wait in a session."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import InboxFull
from perdure.store.base import Store
from perdure.store.deliveries import Accepted
from tests.support import given
from tests.support.given import answer, answering, chooses, opening


async def fill(store: Store, count: int) -> None:
    for n in range(count):
        await store.accept(given.delivery(f"d{n}", limit=count))


async def test_no_more_than_the_limit_are_accepted_and_nothing_else_is_written(store: Store) -> None:
    await fill(store, 3)

    with pytest.raises(InboxFull):
        await store.accept(given.delivery("late", key="k", limit=3))

    assert await store.deliveries("s", ["late"]) == []
    assert await store.first(given.delivery("late", key="k")) is None


async def test_of_a_hundred_callers_at_once_ten_are_accepted(store: Store, other: Store) -> None:
    async def accept(n: int) -> Accepted | InboxFull:
        at, delivery = (store, other)[n % 2], given.delivery(f"d{n}", limit=10)
        try:
            return await given.patiently(lambda: at.accept(delivery))
        except InboxFull as full:
            return full

    outcomes = await asyncio.gather(*(accept(n) for n in range(100)))

    assert sum(isinstance(each, Accepted) for each in outcomes) == 10
    assert sum(isinstance(each, InboxFull) for each in outcomes) == 90
    assert len(await store.unread("s")) == 10


async def test_a_delivery_without_a_limit_is_always_accepted(store: Store) -> None:
    await fill(store, 2)

    assert (await store.accept(given.delivery("more"))).fresh


async def test_consumed_and_refused_deliveries_make_room(store: Store) -> None:
    await fill(store, 2)
    await store.commit(given.consuming("d0"))
    await given.refuse(store, "d1")

    accepted = [await store.accept(given.delivery(name, limit=2)) for name in ("e", "f")]

    assert [each.fresh for each in accepted] == [True, True]
    with pytest.raises(InboxFull):
        await store.accept(given.delivery("g", limit=2))


async def test_a_repeated_request_gets_its_receipt_from_a_full_inbox(store: Store) -> None:
    await store.accept(given.delivery("d", key="k", limit=1))

    assert not (await store.accept(given.delivery("e", key="k", limit=1))).fresh


async def test_a_request_that_is_repeated_at_once_does_not_fill_the_inbox_against_itself(
    store: Store, other: Store
) -> None:
    for n in range(10):
        await store.create_session(given.session(f"s{n}"))

        accepted = await asyncio.gather(
            *(
                (store, other)[m % 2].accept(given.delivery(f"d{m}", session_id=f"s{n}", key=f"k{n}", limit=1))
                for m in range(8)
            )
        )

        assert sum(each.fresh for each in accepted) == 1


async def test_an_answer_that_closes_a_request_always_has_room(store: Store) -> None:
    await store.commit(opening("r"))
    await fill(store, 2)

    answered = await answer(store, answering(("r", chooses("approve")), limit=2))

    assert answered.closed == {"r"}
    assert len(await store.unread("s")) == 3


async def test_what_comes_with_an_answer_that_closes_nothing_has_no_room_in_a_full_inbox(store: Store) -> None:
    await store.commit(opening("r", quorum=2))
    await fill(store, 2)

    with pytest.raises(InboxFull):
        await answer(store, answering(("r", chooses("approve")), limit=2, always=True))

    assert (await given.input_row(store)).votes == ()
    assert await store.deliveries("s", ["a"]) == []


async def test_a_vote_that_delivers_nothing_needs_no_room(store: Store) -> None:
    await store.commit(opening("r", quorum=2))
    await fill(store, 2)

    answered = await answer(store, answering(("r", chooses("approve")), limit=2))

    assert (answered.delivery, answered.rows[0].status) == (None, "open")
    assert list((await given.input_row(store)).votes) == [chooses("approve")]


async def test_a_message_that_interrupts_has_room_only_where_it_takes_the_place_of_others(store: Store) -> None:
    await store.create_session(replace(given.session("task"), mode="task"), given.delivery(session_id="task"))
    interrupting = replace(given.delivery("now"), mode="interrupt", limit=1)
    await store.accept(given.delivery())

    with pytest.raises(InboxFull):
        await store.accept(replace(interrupting, session_id="task"))
    await store.accept(interrupting)

    assert await store.count_unread("s") == 1
