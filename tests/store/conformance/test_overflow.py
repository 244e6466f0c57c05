"""What happens to a message for an inbox in which as many wait as may."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import InboxFull
from perdure.protocol.deliveries import Overflow
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, DeliveryQuery
from tests.support import given


async def accept(store: Store, name: str, overflow: Overflow, *, kind: str = "message", limit: int = 2) -> Accepted:
    body = {"kind": kind, "message": name} if kind == "message" else {"kind": kind}
    ref = {"id": name, "kind": kind, "tokenHash": ""}
    delivery = given.delivery(name, body=body, ref=ref, limit=limit)
    return await store.accept(replace(delivery, overflow=overflow))


async def waiting(store: Store) -> list[str]:
    return [each.delivery_id for each in await store.unread("s")]


async def dropped(store: Store) -> list[str]:
    return [(each.data or {})["deliveryId"] for each in await store.events("s") if each.type == "delivery.refused"]


async def test_the_new_one_is_refused_before_it_is_accepted(store: Store) -> None:
    for name in ("a", "b"):
        await accept(store, name, "reject")

    with pytest.raises(InboxFull):
        await accept(store, "c", "reject")

    assert await waiting(store) == ["a", "b"]
    assert await dropped(store) == []


async def test_the_oldest_one_makes_room(store: Store) -> None:
    for name in ("a", "b", "c", "d"):
        assert (await accept(store, name, "drop_oldest")).fresh

    assert await waiting(store) == ["c", "d"]
    assert await dropped(store) == ["a", "b"]
    listed = (await store.list_deliveries(DeliveryQuery("s", status="settled"))).deliveries
    assert [(each.delivery_id, each.outcome, each.refused) for each in listed] == [
        ("b", "refused", "inbox_overflow"),
        ("a", "refused", "inbox_overflow"),
    ]


async def test_the_new_one_is_accepted_and_settled_at_once(store: Store) -> None:
    for name in ("a", "b", "c"):
        assert (await accept(store, name, "drop_newest")).fresh

    assert await waiting(store) == ["a", "b"]
    assert await dropped(store) == ["c"]


async def test_answers_and_controls_are_not_dropped(store: Store) -> None:
    await accept(store, "a", "drop_oldest", kind="answer")
    await accept(store, "b", "drop_oldest", kind="clear")
    await accept(store, "c", "drop_oldest")
    await accept(store, "d", "drop_oldest")

    assert await waiting(store) == ["a", "b"]
    assert await dropped(store) == ["c", "d"]


async def test_an_inbox_that_was_larger_shrinks_to_its_new_bound(store: Store) -> None:
    for number in range(6):
        await accept(store, f"a{number}", "reject", limit=6)

    await accept(store, "b", "drop_oldest", limit=2)

    assert await waiting(store) == ["a5", "b"]


async def test_the_bound_holds_however_many_come_at_once(store: Store, other: Store) -> None:
    await asyncio.gather(
        *(
            (store if n % 2 else other).accept(replace(given.delivery(f"d{n}", limit=3), overflow="drop_oldest"))
            for n in range(20)
        )
    )

    assert len(await waiting(store)) == 3
    assert len(await dropped(store)) == 17


async def test_a_repeated_request_drops_nothing(store: Store) -> None:
    await accept(store, "a", "drop_oldest", limit=1)

    again = await accept(store, "a", "drop_oldest", limit=1)

    assert not again.fresh
    assert await waiting(store) == ["a"]


async def test_a_cancel_of_what_is_dropped_is_about_nothing_else(store: Store) -> None:
    await store.commit(given.ending(0))
    await accept(store, "a", "drop_oldest", limit=1)
    assert await given.cancel(store) is not None

    await accept(store, "b", "drop_oldest", limit=1)

    assert (await given.read_session(store)).cancel_turn is None
    assert await waiting(store) == ["b"]


async def test_the_message_of_a_task_is_not_dropped(store: Store) -> None:
    task = replace(given.session("t"), mode="task")
    await store.create_session(task, given.delivery("a", session_id="t"))

    with pytest.raises(InboxFull):
        await store.accept(replace(given.delivery("b", session_id="t", limit=1), overflow="drop_oldest"))

    assert [each.delivery_id for each in await store.unread("t")] == ["a"]
