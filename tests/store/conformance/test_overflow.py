"""What happens to a message for an inbox in which as many wait as may."""

import asyncio
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from perdure.errors import InboxFull
from perdure.protocol.deliveries import DeliveryBody, Overflow
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, Change, DeliveryQuery
from tests.support import given


async def accept(
    store: Store,
    name: str,
    overflow: Overflow,
    *,
    kind: str = "message",
    limit: int = 2,
    mode: str | None = None,
    message: Any = None,
) -> Accepted:
    body: JsonObject = (
        {"kind": kind, "message": message or name, "clientContext": []} if kind == "message" else {"kind": kind}
    )
    ref = {"id": name, "kind": kind, "tokenHash": ""}
    delivery = given.delivery(name, body=body, ref=ref, limit=limit)
    return await store.accept(replace(delivery, overflow=overflow, mode=mode))


async def context(store: Store, name: str) -> list[str]:
    """What the model is told with this message."""
    [row] = await store.deliveries("s", [name])
    assert row.body is not None
    return DeliveryBody.model_validate(row.body).client_context[0].splitlines()[1:]


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


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest", "summarize"])
async def test_readers_are_told_at_once_what_made_room(store: Store, policy: Overflow) -> None:
    await accept(store, "a", policy, limit=1)
    async with store.watch("s") as watch:
        await accept(store, "b", policy, limit=1)

        assert await watch.changed(1)

    gone = "b" if policy == "drop_newest" else "a"
    told = [(each.type, each.data) for each in await store.events("s")][-2:]
    assert [type for type, _ in told] == ["delivery.refused", "inbox.overflow"]
    assert told[1][1] == {"deliveryIds": [gone], "policy": policy}


async def test_what_makes_room_is_told_with_the_next_message(store: Store) -> None:
    for name in ("one\nand more", "two", "three", "four"):
        assert (await accept(store, name, "summarize")).fresh

    assert await waiting(store) == ["three", "four"]
    assert await context(store, "three") == ["- one", "- two"]
    [row] = await store.deliveries("s", ["three"])
    assert (row.body or {})["message"] == "three"
    listed = (await store.list_deliveries(DeliveryQuery("s", status="settled"))).deliveries
    assert {(each.delivery_id, each.outcome, each.refused) for each in listed} == {
        ("one\nand more", "superseded", "superseded"),
        ("two", "superseded", "superseded"),
    }


async def test_with_room_for_one_the_new_message_tells_of_the_others(store: Store) -> None:
    for name in ("one", "two", "three"):
        await accept(store, name, "summarize", limit=1)

    assert await waiting(store) == ["three"]
    assert await context(store, "three") == ["- one", "- two"]


async def test_what_is_told_of_the_others_is_bounded(store: Store) -> None:
    for number in range(60):
        await accept(store, f"{number} " + "x" * 10_000, "summarize", limit=1)

    lines = await context(store, f"59 {'x' * 10_000}")
    assert lines[0] == "(9 earlier ones are left out.)"
    assert [line.split()[1] for line in lines[1:]] == [str(number) for number in range(9, 59)]
    assert max(map(len, lines)) <= 210


async def test_however_many_make_room_only_one_of_them_is_in_memory(store: Store) -> None:
    """A session's cap may be lowered when a hundred messages with files of many megabytes wait."""
    for n in range(20):
        await accept(store, f"d{n}", "reject", limit=100, message="x" * 1_000_000)
    tracemalloc.start()
    try:
        await accept(store, "last", "summarize", limit=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert await waiting(store) == ["last"]
    assert peak < 8_000_000


async def test_a_file_is_told_by_its_name(store: Store) -> None:
    parts = [{"type": "file", "mediaType": "text/csv", "data": "YQ==", "filename": "paid.csv"}]
    await accept(store, "a", "summarize", message=parts)
    await accept(store, "b", "summarize", message=[{"type": "text", "text": "\n  see this"}, *parts])

    await accept(store, "c", "summarize", limit=1)

    assert await context(store, "c") == ["- [file: paid.csv]", "- see this"]


async def test_only_messages_that_wait_for_a_turn_of_their_own_are_told_with_another(store: Store) -> None:
    await accept(store, "a", "summarize", kind="answer", limit=4)
    await accept(store, "s", "summarize", mode="steer", limit=4)
    await accept(store, "b", "summarize", mode="followup", limit=4)
    await accept(store, "c", "summarize", mode="collect", limit=4)
    await accept(store, "d", "summarize", mode="steer", limit=4)

    assert await waiting(store) == ["a", "s", "c", "d"]
    assert await context(store, "c") == ["- b"]
    # Nothing more can be told with another one: there is no room.
    with pytest.raises(InboxFull):
        await accept(store, "e", "summarize", mode="steer", limit=4)
    assert await waiting(store) == ["a", "s", "c", "d"]
    assert [each.type for each in await store.events("s")].count("inbox.overflow") == 1


async def test_a_change_of_a_message_keeps_what_it_tells_of_others(store: Store) -> None:
    read = (await accept(store, "a", "summarize", limit=1)).delivery
    read = (await accept(store, "b", "summarize", limit=1)).delivery
    await accept(store, "c", "summarize", limit=2)
    [now] = await store.deliveries("s", ["b"])

    # Who has read it before it told of another one has to read it again.
    stale = await store.edit_delivery(replace(read, edits=0), Change(body={"kind": "message", "message": "changed"}))
    edited = await store.edit_delivery(now, Change(body={**(now.body or {}), "message": "changed"}))

    assert (stale, edited is not None) == (None, True)
    assert await context(store, "b") == ["- a"]


async def test_however_many_come_at_once_each_waits_or_is_told(store: Store, other: Store) -> None:
    await asyncio.gather(
        *(
            (store if n % 2 else other).accept(replace(given.delivery(f"d{n}", limit=3), overflow="summarize"))
            for n in range(20)
        )
    )

    left = await waiting(store)
    assert len(left) == 3
    assert len(await context(store, left[0])) == 17
    assert len(await dropped(store)) == 17


async def test_a_cancel_of_what_is_told_with_another_is_about_nothing_else(store: Store) -> None:
    await store.commit(given.ending(0))
    await accept(store, "a", "summarize", limit=1)
    assert await given.cancel(store) is not None

    await accept(store, "b", "summarize", limit=1)

    assert (await given.read_session(store)).cancel_turn is None
