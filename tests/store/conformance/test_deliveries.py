import asyncio
from dataclasses import replace

import pytest

from perdure.errors import Conflict, IdempotencyConflict, SessionGone, Unavailable
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.events import NewEvent
from perdure.protocol.names import turn_key
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import reference
from perdure.session.state import read_delivery
from perdure.store.base import Store
from perdure.store.deliveries import Change, DeliveryQuery
from perdure.store.values import Commit, Consumption, DeliveryTaken, SessionChange
from tests.support import given
from tests.support.given import consuming


async def test_an_accepted_delivery_waits_to_be_consumed(store: Store) -> None:
    accepted = await store.accept(given.delivery(body={"message": "hi"}))

    assert accepted.fresh
    assert (accepted.delivery.turn, accepted.delivery.refused) == (None, None)
    assert await store.deliveries("s", ["d"]) == [accepted.delivery]


async def test_deliveries_come_in_the_order_asked_for_and_only_those_that_exist(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.accept(given.delivery(name))

    assert [d.delivery_id for d in await store.deliveries("s", ["c", "x", "a"])] == ["c", "a"]
    assert await store.deliveries("s", []) == []


async def test_a_repeated_key_gets_the_first_delivery(store: Store) -> None:
    first = await store.accept(given.delivery("d", key="k"))

    again = await store.accept(given.delivery("e", key="k"))

    assert (again.fresh, again.delivery) == (False, first.delivery)
    assert await store.deliveries("s", ["e"]) == []


async def test_a_repeated_delivery_without_a_key_is_accepted_once(store: Store) -> None:
    await store.accept(given.delivery())

    assert not (await store.accept(given.delivery())).fresh


async def test_a_repeated_key_with_another_request_is_a_conflict(store: Store) -> None:
    await store.accept(given.delivery("d", key="k", digest="one"))

    with pytest.raises(IdempotencyConflict):
        await store.accept(given.delivery("e", key="k", digest="two"))


async def test_of_twenty_deliveries_under_one_key_one_is_fresh(store: Store, other: Store) -> None:
    accepted = await asyncio.gather(
        *((store if n % 2 else other).accept(given.delivery(f"d{n}", key="k")) for n in range(20))
    )

    assert sum(each.fresh for each in accepted) == 1
    assert len({each.delivery.delivery_id for each in accepted}) == 1


async def test_an_unknown_session_accepts_nothing(store: Store) -> None:
    with pytest.raises(SessionGone):
        await store.accept(given.delivery(session_id="unknown"))


async def test_an_ended_session_accepts_nothing_new(store: Store) -> None:
    await store.accept(given.delivery("d", key="k"))
    await store.commit(Commit("s", close=True, change=SessionChange(status="completed")))

    with pytest.raises(SessionGone):
        await store.accept(given.delivery("e"))

    assert not (await store.accept(given.delivery("f", key="k"))).fresh


async def test_a_consumed_delivery_leaves_its_body_to_the_journal(store: Store) -> None:
    await store.accept(given.delivery())

    await store.commit(consuming("d", turn=3))

    (consumed,) = await store.deliveries("s", ["d"])
    assert (consumed.turn, consumed.body) == (3, None)


async def test_the_same_turn_may_consume_a_delivery_again(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(consuming("d", turn=1))

    await store.commit(consuming("d", turn=1))

    assert await given.keys(store) == ["t1/received"]


async def test_another_turn_may_not_consume_it_and_nothing_is_written(store: Store) -> None:
    for name in ("d", "e"):
        await store.accept(given.delivery(name))
    await store.commit(consuming("d", turn=0))

    with pytest.raises(DeliveryTaken):
        await store.commit(consuming("e", "d", turn=1))

    (untouched,) = await store.deliveries("s", ["e"])
    assert (untouched.turn, untouched.body) == (None, {"message": "hello"})
    assert await given.keys(store) == ["t0/received"]


async def test_an_unknown_delivery_cannot_be_consumed(store: Store) -> None:
    with pytest.raises(DeliveryTaken):
        await store.commit(consuming("unknown"))


async def test_a_refused_delivery_emits_its_event_once(store: Store) -> None:
    await store.accept(given.delivery())

    said = [await store.refuse("s", "d", "STALE_TOKEN", given.event("refused/d")) for _ in range(2)]

    (refused,) = await store.deliveries("s", ["d"])
    assert said == [True, True]
    assert (refused.refused, refused.turn, refused.body) == ("STALE_TOKEN", None, None)
    assert await given.keys(store) == ["refused/d"]


async def test_a_refused_delivery_cannot_be_consumed(store: Store) -> None:
    await store.accept(given.delivery())
    await store.refuse("s", "d", "STALE_TOKEN", given.event("refused/d"))

    with pytest.raises(DeliveryTaken):
        await store.commit(consuming("d"))


async def test_a_consumed_delivery_cannot_be_refused(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(consuming("d"))

    assert not await store.refuse("s", "d", "STALE_TOKEN", given.event("refused/d"))
    assert await given.keys(store) == ["t0/received"]


async def test_a_refusal_of_a_missing_delivery_is_emitted_once(store: Store) -> None:
    assert [await given.refuse(store, "unknown") for _ in range(2)] == [True, True]

    assert await given.keys(store) == ["refused/unknown"]
    assert await store.deliveries("s", ["unknown"]) == []


async def test_an_unknown_session_refuses_nothing(store: Store) -> None:
    with pytest.raises(SessionGone):
        await given.refuse(store, session_id="unknown")


async def test_a_refusal_in_an_ended_session_emits_nothing_after_its_end(store: Store) -> None:
    await store.commit(given.closing())

    assert await given.refuse(store, "unknown")

    assert await given.keys(store) == ["session/completed"]


async def test_a_refused_delivery_keeps_its_key(store: Store) -> None:
    first = await store.accept(given.delivery(key="k"))
    await given.refuse(store)

    again = await store.accept(given.delivery("e", key="k"))

    assert (again.fresh, again.delivery.delivery_id) == (False, first.delivery.delivery_id)
    assert again.delivery.refused == "STALE_TOKEN"


async def test_a_delivery_has_one_fate(store: Store, other: Store) -> None:
    names = [f"d{n}" for n in range(20)]
    for name in names:
        await store.accept(given.delivery(name))

    async def consume(name: str) -> bool:
        try:
            await store.commit(Commit("s", consume=Consumption(0, [name])))
        except DeliveryTaken:
            return False
        return True

    fates = await asyncio.gather(
        *(
            asyncio.gather(
                consume(name),
                other.refuse("s", name, "X", given.event(f"refused/{name}")),
            )
            for name in names
        )
    )

    rows = await store.deliveries("s", names)
    refused = set(await given.keys(store))
    for row, (was_consumed, was_refused) in zip(rows, fates, strict=True):
        assert was_consumed != was_refused
        assert was_consumed == (row.turn == 0)
        assert was_refused == (row.refused == "X")
        assert was_refused == (f"refused/{row.delivery_id}" in refused)


async def test_the_reference_of_a_delivery_for_temporal_comes_back(store: Store) -> None:
    ref: JsonObject = {"id": "d", "kind": "message", "tokenHash": "ünïcödé"}

    accepted = await store.accept(given.delivery(key="k", ref=ref))
    await store.commit(consuming("d"))

    (row,) = await store.deliveries("s", ["d"])
    again = await store.accept(given.delivery("e", key="k"))
    assert accepted.delivery.ref == row.ref == again.delivery.ref == ref


async def test_the_first_delivery_under_a_key_is_found_and_nothing_is_written(store: Store) -> None:
    accepted = await store.accept(given.delivery(key="k"))
    await store.commit(given.closing())

    first = await store.first(given.delivery("e", key="k"))

    assert first is not None
    assert (first.fresh, first.delivery.delivery_id) == (False, accepted.delivery.delivery_id)
    assert await store.first(given.delivery("f", key="another")) is None
    assert await store.deliveries("s", ["e", "f"]) == []
    with pytest.raises(IdempotencyConflict):
        await store.first(given.delivery("e", key="k", digest="another"))


async def test_nothing_that_was_accepted_is_ever_deleted(store: Store) -> None:
    for name in ("heard", "refused", "left"):
        await store.accept(given.delivery(name))
    await store.commit(consuming("heard"))
    await given.refuse(store, "refused")

    await store.commit(given.closing())

    rows = await store.deliveries("s", ["heard", "refused", "left"])
    assert [(row.turn, row.refused, row.body) for row in rows] == [
        (0, None, None),
        (None, "STALE_TOKEN", None),
        (None, "session_not_active", None),
    ]


def ended(turn: int, what: str, **data: str) -> NewEvent:
    return NewEvent(type=f"turn.{what}", key=turn_key(turn, what), data=data, turn=turn)


async def ends(store: Store, *delivery_ids: str) -> list[str | None]:
    return [row.outcome for row in await store.deliveries("s", delivery_ids)]


async def test_the_end_of_a_turn_settles_what_it_has_read_and_no_other(store: Store) -> None:
    for name in ("a", "b"):
        await store.accept(given.delivery(name))
    await store.commit(consuming("a"))

    await store.commit(Commit("s", events=[ended(0, "failed", code="X", message="no")]))
    (row,) = await store.deliveries("s", ["a"])

    assert await ends(store, "a", "b") == ["failed", None]
    assert row.error == {"code": "X", "message": "no"}
    assert row.started_at is not None
    assert row.settled_at is not None
    assert (await store.events("s"))[-1].delivery_ids == ("a",)


async def test_what_a_turn_that_waits_for_people_has_read_is_settled_by_a_later_one(store: Store) -> None:
    for name in ("a", "b"):
        await store.accept(given.delivery(name))
    await store.commit(consuming("a"))
    asks = NewEvent(type="input.requested", key="asks", turn=0)

    await store.commit(Commit("s", events=[asks, ended(0, "completed")]))
    parked = await ends(store, "a")
    await store.commit(Commit("s", consume=Consumption(1, ["b"])))
    await store.commit(Commit("s", events=[ended(1, "completed")]))

    assert parked == [None]
    assert await ends(store, "a", "b") == ["completed", "completed"]
    assert (await store.events("s"))[-1].delivery_ids == ("a", "b")


async def test_a_delivery_is_settled_once(store: Store) -> None:
    await store.accept(given.delivery())
    await store.commit(consuming("d"))
    await store.commit(Commit("s", events=[ended(0, "completed")]))

    await store.commit(Commit("s", events=[ended(0, "cancelled")]))

    assert await ends(store, "d") == ["completed"]
    assert (await store.events("s"))[-1].delivery_ids == ()


async def test_the_end_of_a_session_settles_all_that_is_left(store: Store) -> None:
    for name in ("a", "b"):
        await store.accept(given.delivery(name))
    await store.commit(consuming("a"))

    await store.commit(Commit("s", events=[NewEvent(type="session.failed", key="end")], close=True))

    assert await ends(store, "a", "b") == ["failed", "refused"]


async def test_an_edit_needs_the_newest_version_of_a_delivery_that_waits(store: Store) -> None:
    read = (await store.accept(given.delivery(body={"message": "one"}))).delivery

    edited = await store.edit_delivery(read, Change({"message": "two"}))
    stale = await store.edit_delivery(read, Change({"message": "three"}))
    assert edited is not None
    await store.commit(consuming("d"))
    late = await store.edit_delivery(edited, Change({"message": "four"}))

    assert (edited.body, edited.edits) == ({"message": "two"}, 1)
    assert (stale, late) == (None, None)


async def test_a_turn_that_has_read_an_older_version_does_not_consume_it(store: Store) -> None:
    read = (await store.accept(given.delivery(body={"message": "one"}))).delivery
    await store.edit_delivery(read, Change({"message": "two"}))

    with pytest.raises(Unavailable):
        await store.commit(Commit("s", consume=Consumption(0, ["d"], {"d": 0})))
    await store.commit(Commit("s", consume=Consumption(0, ["d"], {"d": 1})))


async def test_the_deliveries_of_a_session_come_in_pages_newest_first(store: Store) -> None:
    for number in range(5):
        await store.accept(given.delivery(f"d{number}"))
    await store.commit(consuming("d0"))

    first = await store.list_deliveries(DeliveryQuery("s", limit=3))
    rest = await store.list_deliveries(DeliveryQuery("s", limit=3, cursor=first.next_cursor))
    queued = await store.list_deliveries(DeliveryQuery("s", status="queued"))
    places = [await store.place_in_queue(row) for row in queued.deliveries]

    assert [row.delivery_id for row in (*first.deliveries, *rest.deliveries)] == ["d4", "d3", "d2", "d1", "d0"]
    assert rest.next_cursor is None
    assert [row.delivery_id for row in queued.deliveries] == ["d4", "d3", "d2", "d1"]
    assert places == [4, 3, 2, 1]
    assert [row.delivery_id for row in await store.find_delivery("d2")] == ["d2"]


async def test_a_delivery_is_moved_as_often_as_drivers_can_read_its_place(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.accept(given.delivery(name, ref=DeliveryRef(id=name, token_hash="t").model_dump(mode="json")))

    async def rotate() -> None:
        for _ in range(300):
            first = (await store.queue("s"))[0]
            await store.edit_delivery(replace(first, body={}), Change(position=2))

    with pytest.raises(Conflict):
        await rotate()

    refs = [reference(row) for row in await store.deliveries("s", ["a", "b", "c"])]
    assert None not in map(read_delivery, refs)


async def test_a_message_that_waits_alone_and_is_moved_stays_before_those_that_come_later(store: Store) -> None:
    first = (await store.accept(given.delivery("a"))).delivery
    assert await store.edit_delivery(first, Change(position=1)) is not None

    for name in ("b", "c"):
        await store.accept(given.delivery(name))

    assert [await store.place_in_queue(each) for each in await store.unread("s")] == [1, 2, 3]
    [a] = await store.deliveries("s", ["a"])
    assert await store.place_in_queue(a) == 1
