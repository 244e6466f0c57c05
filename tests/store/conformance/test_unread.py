"""What waits to be read, and the sessions of which Temporal may not know everything."""

from dataclasses import replace

from perdure.store.base import Store
from perdure.store.values import Commit
from tests.support import given
from tests.support.given import answer, answering, chooses, opening

AN_HOUR = 3600.0


async def unread(store: Store, session_id: str = "s") -> list[str]:
    return [row.delivery_id for row in await store.unread(session_id)]


async def unsignalled(store: Store, older_than: float = -60, after: str = "", limit: int = 100) -> list[str]:
    """Less than nothing: what was accepted in this very moment is found too."""
    return [found.session_id for found in await store.unsignalled(older_than=older_than, after=after, limit=limit)]


async def begun(store: Store, *session_ids: str) -> None:
    """Sessions that have had a turn and wait for the next delivery."""
    for session_id in session_ids:
        if await store.session(session_id) is None:
            await store.create_session(given.session(session_id))
        await store.commit(given.ending(session_id=session_id))


async def test_messages_and_answers_wait_in_the_order_they_were_accepted(store: Store) -> None:
    await store.commit(opening("r"))
    first = await store.accept(given.delivery("z"))
    await answer(store, answering(("r", chooses("approve"))))
    await store.accept(given.delivery("b"))

    rows = await store.unread("s")

    assert [row.delivery_id for row in rows] == ["z", "a", "b"]
    # Without their bodies, which may be large.
    assert rows[0] == replace(first.delivery, body=None)


async def test_deliveries_of_the_same_moment_keep_their_order(store: Store, other: Store) -> None:
    # Backwards by their ids, and faster than the clock ticks.
    names = [f"d{n:02}" for n in range(30, 0, -1)]
    for n, name in enumerate(names):
        await (store, other)[n % 2].accept(given.delivery(name))

    assert await unread(store) == names


async def test_each_session_has_its_own(store: Store) -> None:
    await store.create_session(given.session("t"), given.delivery("first", session_id="t"))
    await store.accept(given.delivery())

    assert await unread(store) == ["d"]
    assert await unread(store, "t") == ["first"]
    assert await unread(store, "unknown") == []


async def test_consumed_and_refused_deliveries_do_not_wait(store: Store) -> None:
    for name in ("heard", "refused", "waiting"):
        await store.accept(given.delivery(name))
    await store.commit(given.consuming("heard"))
    await given.refuse(store, "refused")

    assert await unread(store) == ["waiting"]
    assert await store.count_unread("s") == 1


async def test_a_session_that_was_closed_waits_for_nothing(store: Store) -> None:
    await store.accept(given.delivery())

    await store.commit(given.closing())

    assert await unread(store) == []
    assert await unsignalled(store) == []


async def test_of_a_session_whose_delivery_waits_temporal_may_not_know_all(store: Store) -> None:
    await begun(store, "s", "t")
    await store.accept(given.delivery())

    assert await unsignalled(store) == ["s"]
    assert await unsignalled(store, older_than=AN_HOUR) == []

    await store.commit(given.consuming("d"))
    assert await unsignalled(store) == []


async def test_a_session_that_has_not_begun_may_be_unknown_to_temporal(store: Store) -> None:
    assert await unsignalled(store) == ["s"]
    assert await unsignalled(store, older_than=AN_HOUR) == []

    await store.commit(given.running())
    assert await unsignalled(store) == []


async def test_of_a_turn_that_is_to_be_stopped_temporal_may_not_know(store: Store) -> None:
    await store.commit(given.running())
    await given.cancel(store)

    assert await unsignalled(store, older_than=AN_HOUR) == ["s"]

    await store.commit(Commit("s", settles_cancel=True))
    assert await unsignalled(store) == []


async def test_sessions_come_once_each_in_pages_and_in_order(store: Store) -> None:
    names = [f"s{n}" for n in range(5)]
    await begun(store, "s", *names)
    for name in reversed(names):
        for n in range(2):
            await store.accept(given.delivery(f"{name}/{n}", session_id=name))
        await given.cancel(store, name)

    first = await unsignalled(store, limit=2)
    second = await unsignalled(store, after=first[-1], limit=2)
    third = await unsignalled(store, after=second[-1], limit=2)

    assert [first, second, third] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert await unsignalled(store, after="s4") == []


async def test_of_each_session_all_is_found_whatever_else_is_on_its_page(store: Store) -> None:
    await begun(store, "s", "a", "b", "c")
    for name in ("a", "b", "c"):
        await store.accept(given.delivery(name, session_id=name))
    await given.cancel(store, "b")
    await store.mark_unsignalled("b")
    await store.mark_unsignalled("c")
    # More than a page of what comes later, by each reason for itself.
    for name in ("x", "y", "z"):
        await store.create_session(given.session(name))
        await store.mark_unsignalled(name)

    first, second = await store.unsignalled(older_than=-60, after="", limit=2)
    third, fourth = await store.unsignalled(older_than=-60, after="b", limit=2)

    assert (first.session_id, first.cancel_turn, first.failed) == ("a", None, False)
    assert (second.session_id, second.cancel_turn, second.failed) == ("b", 1, True)
    assert (third.session_id, third.cancel_turn, third.failed) == ("c", None, True)
    assert None not in (first.newest, second.newest, third.newest)
    assert (fourth.session_id, fourth.newest, fourth.failed) == ("x", None, True)


async def test_accepting_a_delivery_reports_whether_all_before_it_were_signalled(store: Store) -> None:
    await store.commit(opening("r", "q"))
    assert not (await store.accept(given.delivery("d0"))).unsignalled
    assert not (await answer(store, answering(("q", chooses("approve")), delivery_id="a0"))).unsignalled
    await store.mark_unsignalled("s")

    accepted = await store.accept(given.delivery("d1"))
    answered = await answer(store, answering(("r", chooses("approve")), delivery_id="a1"))

    assert (accepted.unsignalled, answered.unsignalled) == (True, True)
    assert (await given.read_session(store)).unsignalled
    await store.clear_unsignalled("s", 1)
    assert not (await store.accept(given.delivery("d2"))).unsignalled
    assert not (await given.read_session(store)).unsignalled


async def test_a_repeated_request_reports_it_too(store: Store) -> None:
    await store.commit(opening("r"))
    await store.accept(given.delivery("d", key="k"))
    await answer(store, answering(("r", chooses("approve")), key="l"))
    await store.mark_unsignalled("s")

    accepted = await store.accept(given.delivery("e", key="k"))
    answered = await answer(store, answering(("r", chooses("approve")), delivery_id="b", key="l"))

    assert (accepted.fresh, accepted.unsignalled) == (False, True)
    assert (answered.fresh, answered.unsignalled) == (False, True)


async def test_a_repeated_request_of_another_session_reports_it_of_that_one(store: Store) -> None:
    await store.create_session(given.session("t"))
    await store.accept(given.delivery("d", key="k"))
    await store.mark_unsignalled("t")

    again = await store.accept(given.delivery("e", session_id="t", key="k"))

    assert (again.delivery.session_id, again.unsignalled) == ("s", False)


async def test_a_commit_does_not_forget_unsignalled_deliveries(store: Store) -> None:
    await store.mark_unsignalled("s")

    await store.commit(given.running())

    assert (await given.read_session(store)).unsignalled


async def test_a_mark_that_was_added_since_stays(store: Store, other: Store) -> None:
    await store.mark_unsignalled("s")
    seen = (await given.read_session(store)).unsignalled
    await other.mark_unsignalled("s")

    await store.clear_unsignalled("s", seen)
    assert (await given.read_session(store)).unsignalled

    await store.clear_unsignalled("s", (await given.read_session(store)).unsignalled)
    assert not (await given.read_session(store)).unsignalled


async def test_to_mark_an_unknown_session_is_nothing(store: Store) -> None:
    await store.mark_unsignalled("unknown")

    assert await store.session("unknown") is None


async def test_a_new_session_without_a_delivery_waits_for_one(store: Store) -> None:
    await given.cancel(store)
    assert await unsignalled(store) == ["s"]

    await store.begin_waiting("s")

    row = await given.read_session(store)
    assert (row.status, row.cancel_turn, row.turns) == ("waiting", None, 0)
    assert await unsignalled(store) == []
    assert await given.cancel(store) is None


async def test_a_session_that_is_about_to_begin_or_has_begun_is_not_made_to_wait(store: Store) -> None:
    await store.accept(given.delivery())
    await store.create_session(given.session("t"))
    await store.commit(given.running(session_id="t"))
    await store.create_session(given.session("u"))
    await store.commit(given.closing("u"))

    for each in ("s", "t", "u", "unknown"):
        await store.begin_waiting(each)

    assert [(await given.read_session(store, each)).status for each in ("s", "t", "u")] == [
        "starting",
        "running",
        "completed",
    ]
