import asyncio

import pytest

from perdure.errors import SessionGone
from perdure.store.base import Store
from perdure.store.values import Commit, SlotConflict, SlotWrite
from tests.support import given


async def test_a_commit_on_an_unknown_session_is_refused(store: Store) -> None:
    with pytest.raises(SessionGone):
        await store.commit(Commit("unknown", records=[given.record()]))


async def test_a_record_is_read_back_with_its_attempt(store: Store) -> None:
    await store.commit(given.raising(4))
    commit = Commit("s", fence=given.keeping(4).fence, records=[given.record(text="hello")])

    await store.commit(commit)

    found = await store.record("s", 0, 0, "reply")
    assert found is not None
    assert (found.body, found.format, found.attempt) == ({"text": "hello"}, "test/1", 4)
    assert found.at.endswith("Z")


async def test_a_record_that_is_not_there_is_none(store: Store) -> None:
    assert await store.record("s", 0, 0, "reply") is None


async def test_the_first_writer_wins(store: Store) -> None:
    await store.commit(Commit("s", records=[given.record(by="first")]))

    await store.commit(Commit("s", records=[given.record(by="second"), given.record("call/1", by="second")]))

    assert {r.key: r.body for r in await store.records("s")} == {"call/1": {"by": "second"}, "reply": {"by": "first"}}


async def test_a_second_writer_gets_the_first_record(store: Store) -> None:
    first = Commit("s", unless=(0, 0, "reply"), records=[given.record(by="first")], events=[given.event("a")])
    await store.commit(first)

    second = await store.commit(
        Commit("s", unless=(0, 0, "reply"), records=[given.record("call/1")], events=[given.event("b")])
    )

    assert second.existing is not None
    assert second.existing.body == {"by": "first"}
    assert await given.keys(store) == ["a"]
    assert len(await store.records("s")) == 1


async def test_of_many_writers_at_once_one_wins_and_all_learn_who(store: Store, other: Store) -> None:
    async def write(n: int) -> object:
        at = store if n % 2 else other
        commit = Commit("s", unless=(0, 0, "reply"), records=[given.record(by=n)], events=[given.event(f"by {n}")])
        committed = await at.commit(commit)
        return n if committed.existing is None else committed.existing.body["by"]

    winners = set(await asyncio.gather(*(write(n) for n in range(16))))

    assert len(winners) == 1
    assert await given.keys(store) == [f"by {winners.pop()}"]


async def test_records_come_by_turn_step_and_slot(store: Store) -> None:
    places = [(1, 0, "reply"), (0, 1, "reply"), (0, 0, "reply"), (0, 0, "call/a"), (0, 0, "call/B"), (0, 0, "Ärger")]
    await store.commit(Commit("s", records=[given.record(slot, turn=turn, step=step) for turn, step, slot in places]))

    found = [(r.turn, r.step, r.key) for r in await store.records("s")]

    assert found == sorted(places)


async def test_records_of_some_turns(store: Store) -> None:
    await store.commit(Commit("s", records=[given.record(turn=turn) for turn in range(5)]))

    assert [r.turn for r in await store.records("s", from_turn=1, to_turn=3)] == [1, 2, 3]
    assert [r.turn for r in await store.records("s", from_turn=3)] == [3, 4]


async def test_sessions_do_not_see_each_other(store: Store) -> None:
    await store.create_session(given.session("t"))

    await store.commit(
        Commit("t", records=[given.record()], events=[given.event("a")], slots=[SlotWrite("x", {"n": 1})])
    )

    assert await store.records("s") == []
    assert await store.events("s") == []
    assert await store.slots("s", ["x"]) == {}


async def test_a_slot_counts_its_versions(store: Store) -> None:
    await store.commit(Commit("s", slots=[SlotWrite("x", {"n": 1}), SlotWrite("y", {})]))
    await store.commit(Commit("s", slots=[SlotWrite("x", {"n": 2}, expected=1)]))

    found = await store.slots("s", ["x", "y", "z"])

    assert {name: (slot.value, slot.version) for name, slot in found.items()} == {"x": ({"n": 2}, 2), "y": ({}, 1)}


@pytest.mark.parametrize("expected", [0, 2])
async def test_a_slot_that_changed_since_it_was_read_is_not_overwritten(store: Store, expected: int) -> None:
    await store.commit(Commit("s", slots=[SlotWrite("x", {"n": 1})]))

    with pytest.raises(SlotConflict):
        await store.commit(
            Commit(
                "s",
                records=[given.record()],
                events=[given.event("a")],
                slots=[SlotWrite("y", {}), SlotWrite("x", {"n": 2}, expected=expected)],
            )
        )

    assert await store.records("s") == []
    assert await given.keys(store) == []
    assert list(await store.slots("s", ["x", "y"])) == ["x"]


async def test_a_slot_that_was_never_written_has_version_zero(store: Store) -> None:
    await store.commit(Commit("s", slots=[SlotWrite("x", {}, expected=0)]))

    assert (await store.slots("s", ["x"]))["x"].version == 1


async def test_no_update_of_a_slot_is_lost(store: Store, other: Store) -> None:
    async def count(at: Store) -> None:
        while True:
            slot = (await at.slots("s", ["n"])).get("n")
            value, version = (slot.value["n"], slot.version) if slot and slot.value else (0, 0)
            try:
                await at.commit(Commit("s", slots=[SlotWrite("n", {"n": value + 1}, expected=version)]))
            except SlotConflict:
                continue
            return

    await asyncio.gather(*(count(at) for at in (store, other) * 5))

    assert (await store.slots("s", ["n"]))["n"].value == {"n": 10}
