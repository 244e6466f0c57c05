from perdure.protocol.events import NewEvent
from perdure.store.base import Commit, DeliveryRow, SessionChange, Store
from tests.store import given
from tests.store.given import answer, answering, opening, says

AN_HOUR = 3600.0


async def unheard(store: Store) -> list[str]:
    """The messages that wait, once their age is above zero."""
    return [row.delivery_id for row in await store.unheard(kind="message", older_than=0)]


async def waits(store: Store, *delivery_ids: str) -> None:
    async def found() -> bool:
        return await unheard(store) == [*delivery_ids]

    await given.eventually(found)


async def test_a_delivery_is_unheard_once_it_is_old_enough(store: Store) -> None:
    accepted = await store.accept(given.delivery())

    await waits(store, "d")

    assert await store.unheard(kind="message", older_than=0) == [accepted.delivery]
    assert await store.unheard(kind="message", older_than=AN_HOUR) == []


async def test_messages_and_answers_are_looked_for_apart(store: Store) -> None:
    await store.commit(opening("r"))
    await answer(store, answering(("r", says("approve"))))
    await store.accept(given.delivery(body={"kind": "message", "message": "hi"}))

    await waits(store, "d")

    rows: list[DeliveryRow] = [*await store.unheard(kind="answer", older_than=0)]
    assert [(row.delivery_id, row.body) for row in rows] == [("a", {"kind": "answer", "answers": ["r"]})]


async def test_one_session_can_be_asked_for(store: Store) -> None:
    await store.create_session(given.session("t"), given.delivery("other", session_id="t"))
    await store.accept(given.delivery())

    await waits(store, "other", "d")

    (row,) = await store.unheard(kind="message", older_than=0, session_id="t")
    assert row.delivery_id == "other"


async def test_the_first_delivery_of_a_session_counts_too(empty: Store) -> None:
    await empty.create_session(given.session("t"), given.delivery(session_id="t"))

    await waits(empty, "d")


async def test_what_was_heard_refused_or_withdrawn_does_not_wait(store: Store) -> None:
    refused: NewEvent = given.event("refused")
    for name in ("heard", "refused", "withdrawn", "waiting"):
        await store.accept(given.delivery(name))
    await store.commit(Commit("s", consume=["heard"], consume_turn=0))
    await store.refuse("s", "refused", "STALE_TOKEN", refused)
    await store.withdraw("s", "withdrawn")

    await waits(store, "waiting")


async def test_a_session_that_is_over_waits_for_nothing(store: Store) -> None:
    for n, over in enumerate(
        (
            Commit("s0", close=True),
            Commit("s1", change=SessionChange(status="completed")),
            Commit("s2", change=SessionChange(status="failed")),
        )
    ):
        await store.create_session(given.session(f"s{n}"))
        await store.accept(given.delivery(session_id=over.session_id))
        await store.commit(over)
    await store.accept(given.delivery("last"))

    await waits(store, "last")


async def test_at_most_a_hundred_come_oldest_first(store: Store) -> None:
    for n in range(103):
        await store.accept(given.delivery(f"d{n}"))

    async def full() -> bool:
        return len(await unheard(store)) == 100

    await given.eventually(full)
    rows = await store.unheard(kind="message", older_than=0)
    assert [row.accepted_at for row in rows] == sorted(row.accepted_at for row in rows)
    assert "d0" in {row.delivery_id for row in rows}
    await store.commit(Commit("s", consume=[row.delivery_id for row in rows], consume_turn=0))
    assert len(await unheard(store)) == 3
