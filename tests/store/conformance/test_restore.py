"""A session restored to an earlier turn: later prompts leave turns out, slots are as they were, nothing is deleted."""

from dataclasses import replace

import pytest

from perdure.errors import ForkRefused, RestoreRefused, SessionGone, Unavailable
from perdure.protocol.events import EventType
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork, Restoration
from perdure.store.values import SlotWrite
from tests.store.conformance.test_deletions import delete
from tests.support import given
from tests.support.given import ending, everything, parking, read_session, running


async def after_turns(store: Store, count: int) -> None:
    """So many turns have ended; each wrote its number into the slot `n`, and the third one also the slot `late`."""
    for turn in range(count):
        await store.commit(running(turn))
        slots = [SlotWrite("n", {"value": turn})]
        if turn == 2:
            slots.append(SlotWrite("late", {"value": True}))
        await store.commit(replace(ending(turn), slots=slots, records=[given.record(turn=turn)]))


async def resets(store: Store) -> list[dict[str, object] | None]:
    return [event.data for event in await everything(store) if event.type == EventType.SESSION_RESET]


async def test_later_turns_are_left_out_and_told(store: Store) -> None:
    await after_turns(store, 4)

    row = await store.restore(Restoration("s", "OPERATOR", kept=1))

    assert row.left_out == [(2, 4)]
    assert (await read_session(store)).left_out == [(2, 4)]
    assert await resets(store) == [{"reason": "OPERATOR", "restoredTurn": "turn_1", "keptFromTurn": "turn_4"}]
    assert len(await store.records("s")) == 4
    assert await given.dense(store)


async def test_the_slots_are_as_they_were_then(store: Store) -> None:
    await after_turns(store, 4)
    before = await store.slots("s", ["n"])

    await store.restore(Restoration("s", "OPERATOR", kept=1))

    slots = await store.slots("s", ["n", "late"])
    assert {name: slot.value for name, slot in slots.items()} == {"n": {"value": 1}, "late": None}
    # What has read the old value must notice.
    assert slots["n"].version > before["n"].version


async def test_without_history_the_slots_stay(store: Store) -> None:
    await after_turns(store, 3)

    row = await store.restore(Restoration("s", "UNREADABLE_STATE"))

    assert row.left_out == [(0, 3)]
    assert await resets(store) == [{"reason": "UNREADABLE_STATE", "keptFromTurn": "turn_3"}]
    assert set(await store.slots("s", ["n", "late"])) == {"n", "late"}


async def test_a_repetition_changes_nothing(store: Store) -> None:
    await after_turns(store, 3)

    first = await store.restore(Restoration("s", "OPERATOR", kept=0))
    again = await store.restore(Restoration("s", "OPERATOR", kept=0))

    assert (again.left_out, again.events) == (first.left_out, first.events)
    assert len(await resets(store)) == 1


async def test_ranges_that_touch_become_one(store: Store) -> None:
    await after_turns(store, 4)
    await store.restore(Restoration("s", "OPERATOR", kept=2))
    await store.commit(running(4))
    await store.commit(ending(4))

    row = await store.restore(Restoration("s", "OPERATOR", kept=1))

    assert row.left_out == [(2, 5)]


async def test_a_turn_that_needs_attention_stays(store: Store) -> None:
    await after_turns(store, 3)
    await store.commit(running(3))
    await given.attend(store)

    row = await store.restore(Restoration("s", "OPERATOR", kept=1))

    assert row.left_out == [(2, 3)]


async def test_it_can_be_forked_afterwards_where_prompts_begin(store: Store) -> None:
    await after_turns(store, 4)
    await store.restore(Restoration("s", "OPERATOR", kept=0))
    await store.commit(running(4))
    await store.commit(replace(ending(4), slots=[SlotWrite("n", {"value": 9})]))

    await store.fork(NewFork("f", "token of f", "s", 4))
    with pytest.raises(ForkRefused, match="left out"):
        await store.fork(NewFork("g", "token of g", "s", 2))

    assert (await read_session(store, "f")).left_out == [(1, 4)]
    assert (await store.slots("f", ["n"]))["n"].value == {"value": 9}


async def test_a_turn_that_is_left_out_is_no_turn_to_restore(store: Store) -> None:
    await after_turns(store, 4)
    await store.restore(Restoration("s", "OPERATOR", kept=0))

    with pytest.raises(RestoreRefused, match="left out"):
        await store.restore(Restoration("s", "OPERATOR", kept=2))


async def test_a_fork_that_was_restored_takes_what_its_parent_leaves(store: Store) -> None:
    await after_turns(store, 4)
    await store.fork(NewFork("f", "token of f", "s", 2))
    await store.restore(Restoration("f", "OPERATOR", kept=0))

    await delete(store, "s")

    assert len(await store.records("f")) == 3
    assert (await store.slots("f", ["n", "late"]))["n"].value == {"value": 0}


async def test_its_forks_keep_the_slots_of_the_turns_that_they_share(store: Store) -> None:
    await after_turns(store, 4)
    await store.fork(NewFork("f", "token of f", "s", 3))
    await store.commit(running(4, "f"))
    await store.commit(replace(ending(4, "f"), slots=[SlotWrite("late", {"value": 4})]))

    await store.restore(Restoration("s", "OPERATOR", kept=1))

    slots = {slot.name: slot.value for slot in await store.slots_at("f", 3)}
    assert slots["late"] == {"value": True}


async def test_what_has_read_the_session_before_cannot_commit_to_it(store: Store) -> None:
    await after_turns(store, 3)
    read = await read_session(store)
    await store.restore(Restoration("s", "OPERATOR", kept=0))

    with pytest.raises(Unavailable):
        await store.commit(replace(running(3), left_out=read.left_out))

    await store.commit(replace(running(3), left_out=(await read_session(store)).left_out))


@pytest.mark.parametrize("kept", [-1, 2, 99])
async def test_a_turn_that_has_not_ended_is_refused(store: Store, kept: int) -> None:
    await after_turns(store, 2)

    with pytest.raises(RestoreRefused):
        await store.restore(Restoration("s", "OPERATOR", kept=kept))

    assert (await read_session(store)).left_out == []


async def test_it_is_refused_while_a_turn_runs_or_people_are_asked(store: Store) -> None:
    await after_turns(store, 2)
    await store.commit(running(2))
    with pytest.raises(RestoreRefused, match="A turn runs"):
        await store.restore(Restoration("s", "OPERATOR", kept=0))

    await store.commit(parking("r", turn=2))
    with pytest.raises(RestoreRefused, match="waits for people"):
        await store.restore(Restoration("s", "OPERATOR", kept=0))


async def test_an_ended_session_is_refused(store: Store) -> None:
    await after_turns(store, 2)
    await store.commit(given.closing())

    with pytest.raises(SessionGone):
        await store.restore(Restoration("s", "OPERATOR", kept=0))
