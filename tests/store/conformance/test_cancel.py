"""A cancel request: accepted under the lock of the session, checked by every commit that says so, settled once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from perdure.errors import TurnCancelled
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest
from perdure.store.values import Commit, Consumption, SessionChange, SessionStatus
from tests.support import given
from tests.support.given import answer, answering, cancel, chooses, consuming, ending, parking, running


async def starting(_: Store) -> None: ...


async def runs(store: Store) -> None:
    await store.commit(running(2))


async def parked(store: Store) -> None:
    await store.commit(parking("r", turn=2))


async def parked_with_a_message(store: Store) -> None:
    await parked(store)
    await store.accept(given.delivery())


async def queued(store: Store) -> None:
    await store.commit(ending(2))
    await store.accept(given.delivery())


async def answered(store: Store) -> None:
    """The last request is closed, and no worker knows of it yet."""
    await parked(store)
    await answer(store, answering(("r", chooses("approve"))))


async def idle(store: Store) -> None:
    await store.commit(ending(2))


async def read(store: Store) -> None:
    """What was delivered has been read or refused."""
    for name in ("d", "e"):
        await store.accept(given.delivery(name))
    await store.commit(replace(ending(2), consume=Consumption(2, ["d"])))
    await given.refuse(store, "e")


async def ended(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(running())
    await store.commit(given.closing())


Setup = Callable[[Store], Awaitable[None]]

active = pytest.mark.parametrize(
    ("setup", "turn"),
    [(starting, 0), (runs, 2), (parked, 2), (parked_with_a_message, 2), (queued, 3), (answered, 3)],
)


async def stopped_turn(store: Store) -> int | None:
    return (await given.read_session(store)).cancel_turn


@active
@pytest.mark.parametrize("named", [False, True])
async def test_a_turn_that_runs_or_will_is_stopped_and_readers_know(
    store: Store, setup: Setup, turn: int, named: bool
) -> None:
    await setup(store)

    requested = await cancel(store, turn_id=f"turn_{turn}" if named else None)

    assert requested == CancelRequest("s", turn)
    assert await stopped_turn(store) == turn
    assert (await given.keys(store))[-1] == f"t{turn}/cancel"
    assert await given.dense(store)


@active
async def test_to_ask_again_is_to_ask_once(store: Store, setup: Setup, turn: int) -> None:
    await setup(store)

    asked = [await cancel(store, turn_id=turn_id) for turn_id in (None, f"turn_{turn}", None)]

    assert asked == [CancelRequest("s", turn)] * 3
    assert (await given.keys(store)).count(f"t{turn}/cancel") == 1


@active
@pytest.mark.parametrize("away", [-1, 1])
async def test_another_turn_is_not_stopped_and_nothing_is_written(
    store: Store, setup: Setup, turn: int, away: int
) -> None:
    await setup(store)
    before = await given.read_session(store)

    assert await cancel(store, turn_id=f"turn_{turn + away}") is None
    assert await cancel(store, turn_id="nonsense") is None

    assert await given.read_session(store) == before


@pytest.mark.parametrize("setup", [idle, read, ended])
@pytest.mark.parametrize("turn_id", [None, "turn_0", "turn_2", "turn_3"])
async def test_where_nothing_runs_or_waits_there_is_nothing_to_stop(
    store: Store, setup: Setup, turn_id: str | None
) -> None:
    await setup(store)
    before = await given.read_session(store)

    assert await cancel(store, turn_id=turn_id) is None

    assert await given.read_session(store) == before


async def test_an_unknown_session_has_no_turn(store: Store) -> None:
    assert await cancel(store, "unknown") is None


@active
@pytest.mark.parametrize("later", [0, 1])
async def test_no_commit_that_heeds_the_turn_goes_through(store: Store, setup: Setup, turn: int, later: int) -> None:
    await setup(store)
    await store.accept(given.delivery("unread"))
    await cancel(store)
    before = await given.read_session(store)

    with pytest.raises(TurnCancelled):
        await store.commit(
            Commit(
                "s",
                unless_cancelled=turn + later,
                fence=given.raising(1).fence,
                records=[given.record(turn=turn)],
                events=[given.event("on")],
                consume=Consumption(turn, ["unread"]),
                route="new",
                change=SessionChange(status="running", turns=turn + 1),
            )
        )

    assert await given.read_session(store) == before
    assert await store.records("s") == []
    assert (await store.deliveries("s", ["unread"]))[0].unread
    assert await store.token_of("s") == "token of s"


async def test_a_commit_that_checks_no_turn_or_an_earlier_one_succeeds(store: Store) -> None:
    await runs(store)
    await cancel(store)

    await store.commit(Commit("s", events=[given.event("a")]))
    await store.commit(Commit("s", unless_cancelled=1, events=[given.event("b")]))

    assert (await given.keys(store))[-2:] == ["a", "b"]
    assert await stopped_turn(store) == 2


async def test_what_was_written_before_is_found_all_the_same(store: Store) -> None:
    await store.commit(replace(running(), records=[given.record(by="first")]))
    await cancel(store)

    again = await store.commit(replace(running(), unless=(0, 0, "reply")))

    assert again.existing is not None
    assert again.existing.body == {"by": "first"}


async def test_a_stopped_turn_is_found_before_the_fence_is_touched(store: Store) -> None:
    await store.commit(given.raising(1))
    await cancel(store)

    with pytest.raises(TurnCancelled):
        await store.commit(replace(given.raising(2), unless_cancelled=0))

    await store.commit(replace(given.keeping(1), events=[given.event("still mine")]))


@pytest.mark.parametrize("status", ["waiting", "completed", "failed"])
async def test_the_commit_that_ends_the_turn_settles_the_cancel_request(store: Store, status: SessionStatus) -> None:
    await runs(store)
    await cancel(store)

    await store.commit(Commit("s", change=SessionChange(status=status, turns=3)))

    assert await stopped_turn(store) is None


async def test_a_commit_of_the_turn_that_does_not_end_it_settles_nothing(store: Store) -> None:
    await runs(store)
    await cancel(store)

    await store.commit(Commit("s", events=[given.event("a")], change=SessionChange(status="running", turns=3)))

    assert await stopped_turn(store) == 2


async def test_a_cancel_request_that_stopped_nothing_stays_while_a_delivery_waits(store: Store) -> None:
    await queued(store)
    await cancel(store)
    wanted = await stopped_turn(store)

    await store.commit(Commit("s", settles_cancel=True))

    assert wanted is not None
    assert await stopped_turn(store) == wanted


async def test_the_end_of_a_turn_settles_no_cancel_request_of_the_next(store: Store) -> None:
    await queued(store)
    await cancel(store)

    # The same end again, as a retried activity writes it.
    await store.commit(ending(2))

    assert await stopped_turn(store) == 3
    with pytest.raises(TurnCancelled):
        await store.commit(running(3))
    await store.commit(replace(ending(3), unless_cancelled=None))
    assert await stopped_turn(store) is None


async def test_a_stopped_session_can_be_stopped_again(store: Store) -> None:
    for turn in range(3):
        await store.commit(running(turn))
        assert await cancel(store) == CancelRequest("s", turn)
        await store.commit(replace(ending(turn), unless_cancelled=None))

    emitted = [key for key in await given.keys(store) if key.endswith("cancel")]
    assert emitted == ["t0/cancel", "t1/cancel", "t2/cancel"]


async def test_a_cancel_request_that_an_answer_overtakes_applies_to_the_next_turn(store: Store) -> None:
    await parked(store)
    await cancel(store)
    await answer(store, answering(("r", chooses("approve"))))

    with pytest.raises(TurnCancelled):
        await store.commit(running(3))

    assert await cancel(store) == CancelRequest("s", 3)
    with pytest.raises(TurnCancelled):
        await store.commit(running(3))


@pytest.mark.parametrize("setup", [starting, runs, parked, queued])
async def test_the_end_of_the_session_settles_every_cancel_request(store: Store, setup: Setup) -> None:
    await setup(store)
    await cancel(store)

    await store.commit(given.closing())

    assert await stopped_turn(store) is None
    assert await store.unsignalled(older_than=-60, after="", limit=10) == []


async def test_the_refusal_of_the_last_delivery_that_waits_settles_the_cancel_request(store: Store) -> None:
    await queued(store)
    await store.accept(given.delivery("e"))
    await cancel(store)

    await given.refuse(store, "d")
    assert await stopped_turn(store) == 3
    await given.refuse(store, "e")

    assert await stopped_turn(store) is None
    # What comes next is something else, and runs.
    await store.accept(given.delivery("f"))
    await store.commit(replace(running(3), consume=Consumption(3, ["f"])))
    assert await given.dense(store)


async def test_the_refusal_of_the_only_delivery_of_a_new_session_settles_the_cancel_request(empty: Store) -> None:
    await empty.create_session(given.session(), given.delivery())
    await cancel(empty)

    await given.refuse(empty, "d")

    assert await stopped_turn(empty) is None


@pytest.mark.parametrize(("setup", "turn"), [(runs, 2), (parked, 2)])
async def test_a_refusal_settles_nothing_while_the_turn_runs_or_waits_for_people(
    store: Store, setup: Setup, turn: int
) -> None:
    await setup(store)
    await store.accept(given.delivery("late"))
    await cancel(store)

    await given.refuse(store, "late")

    assert await stopped_turn(store) == turn


async def test_a_consumed_delivery_cannot_be_refused_and_settles_nothing(store: Store) -> None:
    await queued(store)
    await store.commit(consuming("d", turn=3))
    await store.accept(given.delivery("e"))
    await cancel(store)

    assert not await given.refuse(store, "d")

    assert await stopped_turn(store) == 3


async def test_of_twenty_cancel_requests_at_once_one_is_emitted(store: Store, other: Store) -> None:
    await runs(store)

    asked = await asyncio.gather(*(cancel((store, other)[n % 2]) for n in range(20)))

    assert {each.turn for each in asked if each} == {2}
    assert (await given.keys(store)).count("t2/cancel") == 1
    assert await given.dense(store)


async def test_a_cancel_request_and_the_end_of_the_turn_at_once_agree_on_which_came_first(
    store: Store, other: Store
) -> None:
    names = [f"s{n}" for n in range(50)]
    for name in names:
        await store.create_session(given.session(name))
        await store.commit(running(session_id=name))

    async def end(name: str) -> bool:
        try:
            await other.commit(ending(session_id=name))
        except TurnCancelled:
            return False
        return True

    async def race(n: int, name: str) -> tuple[CancelRequest | None, bool]:
        if n % 2:
            return await asyncio.gather(cancel(store, name), end(name))
        ended, asked = await asyncio.gather(end(name), cancel(store, name))
        return asked, ended

    raced = await asyncio.gather(*(race(n, name) for n, name in enumerate(names)))

    for name, (asked, ended) in zip(names, raced, strict=True):
        row = await given.read_session(store, name)
        if asked is None:
            assert ended
            assert (row.status, row.cancel_turn) == ("waiting", None)
            assert await given.keys(store, name) == ["t0/end"]
        else:
            assert not ended
            assert asked == CancelRequest(name, 0)
            assert (row.status, row.cancel_turn) == ("running", 0)
            assert await given.keys(store, name) == ["t0/cancel"]
        assert await given.dense(store, name)


async def test_a_cancel_request_and_the_begin_of_the_turn_at_once_stop_the_same_turn(
    store: Store, other: Store
) -> None:
    names = [f"s{n}" for n in range(20)]
    for name in names:
        await store.create_session(given.session(name))
        await store.commit(ending(2, session_id=name))
        await store.accept(given.delivery(session_id=name))

    async def begin(name: str) -> bool:
        try:
            await other.commit(replace(running(3, session_id=name), consume=Consumption(3, ["d"])))
        except TurnCancelled:
            return False
        return True

    raced = await asyncio.gather(*(asyncio.gather(cancel(store, name), begin(name)) for name in names))

    for name, (asked, begun) in zip(names, raced, strict=True):
        assert asked == CancelRequest(name, 3)
        assert (await store.deliveries(name, ["d"]))[0].unread != begun
        with pytest.raises(TurnCancelled):
            await store.commit(ending(3, session_id=name))


async def test_a_cancel_request_and_a_refusal_at_once_leave_no_cancel_request_behind(
    store: Store, other: Store
) -> None:
    names = [f"s{n}" for n in range(20)]
    for name in names:
        await store.create_session(given.session(name))
        await store.commit(ending(session_id=name))
        await store.accept(given.delivery(session_id=name))

    await asyncio.gather(
        *(asyncio.gather(cancel(store, name), given.refuse(other, "d", session_id=name)) for name in names)
    )

    for name in names:
        assert (await given.read_session(store, name)).cancel_turn is None


async def test_readers_wake(store: Store) -> None:
    async with store.watch("s") as watch:
        while await watch.changed(0.05):
            pass

        await cancel(store)

        assert await watch.changed(5)


async def test_a_message_that_interrupts_is_not_what_an_earlier_cancel_meant(store: Store) -> None:
    await queued(store)
    await cancel(store)

    await store.accept(replace(given.delivery("now"), mode="interrupt"))

    assert await stopped_turn(store) is None


async def test_a_cancel_of_the_turn_of_an_answer_outlasts_an_interrupt(store: Store) -> None:
    await answered(store)
    await store.accept(given.delivery())
    await cancel(store)

    await store.accept(replace(given.delivery("now"), mode="interrupt"))

    assert await stopped_turn(store) == 3


async def test_a_cancel_of_a_turn_that_has_not_begun_says_what_it_means(store: Store) -> None:
    await store.commit(given.ending(0))
    for name in ("a", "b"):
        newest = (await store.accept(given.delivery(name))).delivery.accepted_at

    requested = await cancel(store)
    await store.accept(given.delivery("c"))
    again = await cancel(store)

    assert requested is not None
    assert requested.until == newest
    # It was asked for again, and means what waits now.
    assert again is not None
    assert again.until is not None
    assert again.until > newest


async def test_a_cancel_of_a_turn_that_runs_needs_only_its_number(store: Store) -> None:
    await store.commit(given.running())
    await store.accept(given.delivery())

    requested = await cancel(store)

    assert requested is not None
    assert (requested.turn, requested.until) == (0, None)


async def test_a_cancel_of_what_was_withdrawn_leaves_the_turn_of_a_later_message_alone(store: Store) -> None:
    await queued(store)
    await cancel(store)
    await store.accept(given.delivery("later"))

    assert await given.refuse(store)

    assert await stopped_turn(store) is None


async def test_a_cancel_stops_what_waited_with_what_was_withdrawn(store: Store) -> None:
    await queued(store)
    await store.accept(given.delivery("e"))
    await cancel(store)
    await store.accept(given.delivery("later"))

    assert await given.refuse(store)

    assert await stopped_turn(store) == 3


async def test_a_cancel_that_is_asked_for_again_means_what_waits_then(store: Store) -> None:
    await queued(store)
    await cancel(store)
    await store.accept(given.delivery("later"))
    again = await cancel(store)

    assert await given.refuse(store)

    assert again is not None
    assert (await given.read_session(store)).cancel_until == again.until
    assert await stopped_turn(store) == 3
