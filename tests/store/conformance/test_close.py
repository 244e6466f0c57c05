"""The end of a session: unread deliveries are refused, open requests are withdrawn, and both are emitted."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import SessionGone, Superseded
from perdure.protocol.events import EventType, NewEvent, Usage
from perdure.store.base import Store
from perdure.store.deliveries import Accepted
from perdure.store.inputs import Answered
from perdure.store.values import Commit, Consumption, Hold, InputChanges, SessionChange, SessionQuery, SessionStatus
from tests.store.conformance.conftest import Database
from tests.support import given
from tests.support.given import answer, answering, chooses, closing


async def test_unread_deliveries_are_refused_with_an_event_before_the_end(store: Store) -> None:
    for name in ("heard", "refused", "one", "two"):
        await store.accept(given.delivery(name))
    await store.commit(given.consuming("heard"))
    await given.refuse(store, "refused")

    await store.commit(replace(closing(), events=[given.event("last words"), *closing().events]))

    *events, end = (await given.everything(store))[2:]
    assert events[0].key == "last words"
    assert {event.key for event in events[1:]} == {"session/refused/one", "session/refused/two"}
    assert {event.type for event in events[1:]} == {EventType.DELIVERY_REFUSED}
    assert end.type == EventType.SESSION_COMPLETED
    assert [row.refused for row in await store.deliveries("s", ["one", "two"])] == ["session_not_active"] * 2
    assert await given.dense(store)


async def test_the_event_of_a_refusal_names_the_delivery_and_the_reason(store: Store) -> None:
    await store.accept(given.delivery())

    await store.commit(closing())

    event = (await given.everything(store))[0]
    assert event.data is not None
    assert (event.data["deliveryId"], event.data["code"], event.delivery_ids) == ("d", "session_not_active", ("d",))
    assert event.data["message"]


async def test_what_the_closing_commit_reads_itself_is_not_refused(store: Store) -> None:
    await store.accept(given.delivery())

    await store.commit(replace(closing(), consume=Consumption(0, ["d"])))

    (row,) = await store.deliveries("s", ["d"])
    assert (row.turn, row.refused) == (0, None)
    assert await given.keys(store) == ["session/completed"]


async def test_open_requests_are_withdrawn_with_an_event_before_the_end(store: Store) -> None:
    await store.commit(given.parking("r", "q"))
    await store.accept(given.delivery())
    emitted = {each: given.event(f"withdrawn/{each}") for each in ("r", "q")}

    await store.commit(replace(closing(), inputs=InputChanges(withdraws=["r"], resolved=emitted)))

    keys = await given.keys(store)
    assert keys == ["t0/end", "withdrawn/r", "withdrawn/q", "session/refused/d", "session/completed"]
    assert [(await given.input_row(store, each)).status for each in ("r", "q")] == ["withdrawn"] * 2
    assert await given.dense(store)


async def test_a_session_that_is_closed_again_emits_nothing_new(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(closing())
    before = await given.everything(store)

    await store.commit(closing())

    assert await given.everything(store) == before


async def test_a_session_has_one_end_if_two_close_it(store: Store) -> None:
    await store.commit(closing())
    failed = NewEvent(type=EventType.SESSION_FAILED, key="session/failed")

    await store.commit(Commit("s", events=[failed], close=True, change=SessionChange(status="failed")))

    assert await given.keys(store) == ["session/completed"]
    assert (await given.read_session(store)).status == "completed"


@pytest.mark.parametrize(
    "late",
    [
        given.running(),
        Commit("s", records=[given.record()]),
        Commit("s", events=[given.event("late")]),
        Commit("s", fence=given.fence(Hold.RAISE, 1), events=[given.event("late")]),
        given.opening("r"),
        replace(closing(), fence=given.fence(Hold.RELEASE, 1)),
    ],
    ids=["a turn", "a record", "an event", "an attempt", "a request", "an attempt that would end it"],
)
async def test_nothing_follows_the_end(store: Store, late: Commit) -> None:
    await store.commit(closing())

    with pytest.raises(Superseded):
        await store.commit(late)

    assert await given.keys(store) == ["session/completed"]
    assert (await given.read_session(store)).status == "completed"
    assert await store.records("s") == []


@pytest.mark.parametrize("status", ["completed", "failed"])
async def test_a_session_that_was_brought_back_after_its_end_has_ended(
    store: Store, database: Database, status: SessionStatus
) -> None:
    error = {"code": "GONE"} if status == "failed" else None
    await store.commit(replace(closing(), change=SessionChange(status=status, error=error)))
    # As builds of old let an attempt do it that woke late.
    database.run("UPDATE sessions SET status = 'running'")

    assert (await given.read_session(store)).status == status
    assert [row.status for row in (await store.sessions(SessionQuery())).sessions] == [status]


async def test_other_sessions_keep_what_they_have(store: Store) -> None:
    await store.create_session(given.session("t"), given.delivery(session_id="t"))

    await store.commit(closing())

    assert len(await store.unread("t")) == 1


async def test_a_closing_commit_that_fails_refuses_nothing(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(given.raising(2))

    with pytest.raises(Exception, match="newer attempt"):
        await store.commit(replace(closing(), fence=given.keeping(1).fence))

    assert len(await store.unread("s")) == 1
    assert await given.keys(store) == []


async def test_a_repeated_request_learns_that_its_delivery_was_refused(store: Store) -> None:
    await store.accept(given.delivery(key="k"))
    await store.commit(closing())

    again = await store.accept(given.delivery("e", key="k"))

    assert (again.fresh, again.delivery.refused) == (False, "session_not_active")


async def test_whatever_is_accepted_while_the_session_closes_has_a_fate(store: Store, other: Store) -> None:
    for n in range(10):
        session_id = f"s{n}"
        await store.create_session(given.session(session_id))

        async def accept(m: int, session_id: str = session_id) -> Accepted | SessionGone:
            try:
                return await (store, other)[m % 2].accept(given.delivery(f"d{m}", session_id=session_id))
            except SessionGone as gone:
                return gone

        accepting = [accept(m) for m in range(8)]
        # Now among the first, now among the last.
        *outcomes, _ = await asyncio.gather(
            *accepting[: n % 5 + 2], *accepting[n % 5 + 2 :], other.commit(closing(session_id))
        )

        accepted = [each.delivery.delivery_id for each in outcomes if isinstance(each, Accepted)]
        rows = await store.deliveries(session_id, [f"d{m}" for m in range(8)])
        assert sorted(accepted) == [row.delivery_id for row in rows]
        assert {row.refused for row in rows} <= {"session_not_active"}
        assert await store.unread(session_id) == []
        *emitted, end = await given.keys(store, session_id)
        assert sorted(emitted) == [f"session/refused/{each}" for each in sorted(accepted)]
        assert end == "session/completed"
        assert await given.dense(store, session_id)


async def test_an_answer_that_races_the_end_is_refused_or_comes_too_late(store: Store, other: Store) -> None:
    for n in range(10):
        session_id, request_id = f"s{n}", f"r{n}"
        await store.create_session(given.session(session_id))
        await store.commit(given.parking(request_id, session_id=session_id))
        answers = answering((request_id, chooses("approve")), session_id=session_id)
        close = replace(closing(session_id), inputs=InputChanges(resolved={request_id: given.event("withdrawn")}))
        at_once = [answer(store, answers), other.commit(close)]

        outcomes = await asyncio.gather(*(at_once if n % 2 else at_once[::-1]))

        (answered,) = [each for each in outcomes if isinstance(each, Answered)]
        keys = await given.keys(store, session_id)
        if answered.closed:
            assert keys == ["t0/end", f"resolved/{request_id}", "session/refused/a", "session/completed"]
        else:
            assert keys == ["t0/end", "withdrawn", "session/completed"]
            assert (answered.delivery, answered.rows[0].status) == (None, "withdrawn")
        assert await store.unread(session_id) == []
        assert await given.dense(store, session_id)


async def test_what_races_the_close_of_a_session_is_early_or_too_late(store: Store, other: Store) -> None:
    for n in range(10):
        session_id = f"s{n}"
        await store.create_session(given.session(session_id))
        await store.commit(given.ending(session_id=session_id))
        await store.accept(given.delivery(session_id=session_id))
        at_once = [
            given.cancel(store, session_id),
            given.attend(other, session_id=session_id),
            store.commit(closing(session_id)),
            given.refuse(other, "d", session_id),
            given.refuse(store, "unknown", session_id),
        ]

        await asyncio.gather(*at_once[n % 5 :], *at_once[: n % 5])

        row = await given.read_session(store, session_id)
        assert (row.status, row.cancel_turn, row.attention) == ("completed", None, None)
        assert (await given.keys(store, session_id))[-1] == "session/completed"
        assert await given.dense(store, session_id)


async def test_usage_may_be_counted_after_the_end(store: Store) -> None:
    await store.commit(given.closing())
    paid = Commit("s", records=[given.record("usage/1")], change=SessionChange(usage=Usage(input_tokens=5)))

    with pytest.raises(Superseded):
        await store.commit(paid)
    await store.commit(replace(paid, late=True))

    row = await given.read_session(store)
    assert (row.status, row.usage.input_tokens) == ("completed", 5)
