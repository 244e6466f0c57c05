"""Checkpoints of a session: taken with a commit, looked at, and written again."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure.errors import CheckpointNotFound, RestoreRefused, SessionBusy, SessionGone
from perdure.protocol.events import EventType
from perdure.store.base import Store
from perdure.store.checkpoints import LARGEST_SNAPSHOT, MOST_NOTES, UNNAMED_KEPT, Rollback
from perdure.store.lifecycle import NewFork
from perdure.store.values import Commit, Consumption, NewCheckpoint, SlotWrite
from tests.store.conformance.conftest import Database
from tests.support import given
from tests.support.given import ending, everything, read_session, running

PLAN: dict[str, Any] = {"value": {"objective": "o", "status": "active", "steps": []}}
LOG: dict[str, Any] = {"value": [1], "slice": {"itemType": "int", "policy": "log"}}
ITEMS: dict[str, Any] = {"value": [1], "slice": {"itemType": "int", "policy": "state"}}


async def take(store: Store, number: int, *slots: SlotWrite, name: str | None = None) -> str:
    checkpoint_id = f"chk_{number}"
    await store.commit(Commit("s", slots=slots, checkpoint=NewCheckpoint(checkpoint_id, 0, 1, name)))
    return checkpoint_id


async def idle(store: Store) -> None:
    """A session whose first turn has ended."""
    await store.commit(running())
    await store.commit(ending())


async def values(store: Store) -> dict[str, Any]:
    return {name: slot.value for name, slot in (await store.slots("s")).items()}


async def told(store: Store, *types: str) -> Sequence[Any]:
    return [event.data for event in await everything(store) if event.type in types]


async def test_a_snapshot_has_the_state_as_the_commit_leaves_it(store: Store) -> None:
    await idle(store)
    newer = {"version": 3, "data": [1, 2]}
    own = {"value": ["key"]}
    written = {"cart": {"value": 1}, "newer": newer, "perdure.approvals": own, "perdure.plan": PLAN}
    slices = {"perdure.slice/log": LOG, "perdure.slice/items": ITEMS}

    await take(store, 1, *(SlotWrite(name, value) for name, value in {**written, **slices}.items()), name="half")

    found = await store.checkpoints.find("s", "chk_1")
    assert found is not None
    assert found.snapshot is not None
    session = await read_session(store)
    assert {**found.snapshot, "takenAt": ""} == {
        "version": "1",
        "sessionId": "s",
        "createdAt": session.created_at,
        "takenAt": "",
        "turn": 0,
        "step": 1,
        "tags": {},
        "parentId": None,
        "childrenIds": [],
        "slices": [
            {"name": "items", "itemType": "int", "policy": "state", "version": 1, "items": [1]},
            {"name": "log", "itemType": "int", "policy": "log", "version": 1, "items": [1]},
        ],
        "slots": {"cart": 1, "newer": [1, 2]},
        "slotVersions": {"newer": 3},
        "plan": PLAN["value"],
    }
    place = {"turnId": "turn_0", "stepIndex": 1}
    assert await told(store, EventType.CHECKPOINT_CREATED) == [{"checkpointId": "chk_1", "name": "half", **place}]
    assert await store.checkpoints.find("s", "chk_2") is None
    assert await store.checkpoints.find("other", "chk_1") is None


async def test_a_snapshot_of_now_names_the_newest_step_also_in_a_fork_of_it(store: Store) -> None:
    before = await store.checkpoints.snapshot("s")
    await store.commit(Commit("s", records=[given.record(step=0), given.record(step=2)]))
    await idle(store)
    await store.fork(NewFork("f", "token of f", "s", 0))

    places: list[object] = [None if before is None else (before["turn"], before["step"])]
    for session_id in ("s", "f"):
        snapshot = await store.checkpoints.snapshot(session_id)
        assert snapshot is not None
        places.append((snapshot["turn"], snapshot["step"]))

    assert places == [(0, 0), (0, 2), (0, 2)]


async def test_the_newest_and_all_with_names_are_kept(store: Store) -> None:
    await idle(store)
    await take(store, 0, name="first")
    for number in range(1, UNNAMED_KEPT + 6):
        await take(store, number)

    kept = await store.checkpoints.list("s", 100)

    assert [each.checkpoint_id for each in kept] == [f"chk_{n}" for n in range(UNNAMED_KEPT + 5, 5, -1)] + ["chk_0"]
    assert all(each.snapshot is None and each.size > 0 for each in kept)
    after = await store.checkpoints.list("s", 2, before=kept[0].number)
    assert [each.checkpoint_id for each in after] == [each.checkpoint_id for each in kept[1:3]]


async def test_state_that_is_too_large_makes_no_checkpoint_and_the_commit_goes_on(store: Store) -> None:
    await idle(store)

    await take(store, 1, SlotWrite("large", {"value": "x" * LARGEST_SNAPSHOT}))

    assert await store.checkpoints.list("s", 10) == []
    assert (await values(store))["large"] == {"value": "x" * LARGEST_SNAPSHOT}
    [failed] = await told(store, EventType.CHECKPOINT_FAILED)
    assert failed["reason"] == f"its state is larger than {LARGEST_SNAPSHOT} bytes"


async def test_a_rollback_writes_the_state_again_and_keeps_logs(store: Store) -> None:
    await idle(store)
    first = [SlotWrite("cart", {"value": 1}), SlotWrite("perdure.slice/log", LOG), SlotWrite("perdure.plan", PLAN)]
    await take(store, 1, *first, SlotWrite("perdure.slice/items", ITEMS), name="half")
    more = {**LOG, "value": [1, 2]}
    later = {"cart": {"value": 2}, "late": {"value": 3}, "perdure.slice/log": more, "perdure.approvals": {"value": 4}}
    await store.commit(Commit("s", slots=[SlotWrite(name, value) for name, value in later.items()]))
    version = (await store.slots("s"))["cart"].version

    await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    now = await values(store)
    assert now["cart"] == {"value": 1}
    assert now["late"] is None
    assert now["perdure.slice/log"] == more
    assert now["perdure.approvals"] == {"value": 4}
    assert (await store.slots("s"))["cart"].version == version + 1
    session = await read_session(store)
    [note] = session.notes
    assert "the checkpoint 'half'" in note
    assert "cart, late" in note
    place = {"turnId": "turn_0", "stepIndex": 1}
    assert await told(store, EventType.SESSION_ROLLED_BACK) == [{"checkpointId": "chk_1", "name": "half", **place}]

    await store.checkpoints.roll_back(Rollback("s", "chk_1", include_logs=True))
    assert (await values(store))["perdure.slice/log"] == LOG


async def test_a_repeated_rollback_changes_nothing(store: Store) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": 1}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 2})]))

    first = await store.checkpoints.roll_back(Rollback("s", "chk_1"))
    before = await everything(store)
    again = await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    assert await everything(store) == before
    assert first == again == await read_session(store)
    assert len((await read_session(store)).notes) == 1


async def test_what_a_newer_build_says_of_a_slice_survives_a_rollback(store: Store) -> None:
    await idle(store)
    newer = {"value": [1], "slice": {"itemType": "int", "policy": "state", "unit": "m"}}
    await take(store, 1, SlotWrite("perdure.slice/items", newer))
    await store.commit(Commit("s", slots=[SlotWrite("perdure.slice/items", {**newer, "value": [2]})]))

    await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    assert (await values(store))["perdure.slice/items"] == newer


async def test_a_session_keeps_a_limited_number_of_notes_until_a_turn_reads_them(store: Store) -> None:
    await idle(store)
    for number in (1, 2):
        await take(store, number, SlotWrite("cart", {"value": number}))
    for number in range(MOST_NOTES):
        await store.checkpoints.roll_back(Rollback("s", f"chk_{number % 2 + 1}"))
    before = await everything(store)

    with pytest.raises(RestoreRefused, match="since its last turn"):
        await store.checkpoints.roll_back(Rollback("s", f"chk_{MOST_NOTES % 2 + 1}"))

    assert await everything(store) == before
    assert len((await read_session(store)).notes) == MOST_NOTES
    # The last one again is the same one.
    await store.checkpoints.roll_back(Rollback("s", f"chk_{(MOST_NOTES - 1) % 2 + 1}"))


async def test_a_rollback_tells_true_from_one(store: Store) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": True}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 1})]))

    await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    assert (await values(store))["cart"]["value"] is True


async def test_the_turn_that_reads_the_next_message_takes_the_notes(store: Store) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": 1}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 2})]))
    await store.checkpoints.roll_back(Rollback("s", "chk_1"))
    await store.accept(given.delivery("next"))

    await store.commit(Commit("s", consume=Consumption(1, ["next"], notes=1)))

    assert (await read_session(store)).notes == ()


async def test_a_fork_of_the_last_turn_has_the_notes_of_its_state(store: Store) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": 1}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 2})]))
    await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    await store.fork(NewFork("f", "hash of f", "s", 0))

    forked = await read_session(store, "f")
    assert forked.notes == (await read_session(store)).notes
    assert (await store.slots("f"))["cart"].value == {"value": 1}


async def test_a_snapshot_of_a_newer_version_is_refused_and_nothing_changes(store: Store, database: Database) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": 1}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 2})]))
    database.run('UPDATE checkpoints SET snapshot = REPLACE(snapshot, \'"version":"1"\', \'"version":"999"\')')

    with pytest.raises(RestoreRefused, match="'999'"):
        await store.checkpoints.roll_back(Rollback("s", "chk_1"))

    assert (await values(store))["cart"] == {"value": 2}
    assert await told(store, EventType.SESSION_ROLLED_BACK) == []


async def test_notes_that_a_turn_has_not_read_wait_for_the_next_one(store: Store) -> None:
    await idle(store)
    for number in (1, 2):
        await take(store, number, SlotWrite("cart", {"value": number}))
        await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 9})]))
        await store.checkpoints.roll_back(Rollback("s", f"chk_{number}"))
    both = (await read_session(store)).notes
    await store.accept(given.delivery("control"))
    await store.commit(given.consuming("control", turn=1))
    assert (await read_session(store)).notes == both

    await store.commit(Commit("s", consume=Consumption(1, [], notes=1)))

    assert len(both) == 2
    assert list((await read_session(store)).notes) == [both[1]]


async def test_a_busy_session_is_not_rolled_back(store: Store) -> None:
    await idle(store)
    await take(store, 1)
    await store.accept(given.delivery("waits"))
    with pytest.raises(SessionBusy):
        await store.checkpoints.roll_back(Rollback("s", "chk_1"))
    await store.commit(given.consuming("waits", turn=1))
    await store.commit(running(1))
    with pytest.raises(SessionBusy):
        await store.checkpoints.roll_back(Rollback("s", "chk_1"))
    with pytest.raises(CheckpointNotFound):
        await store.checkpoints.roll_back(Rollback("s", "chk_9"))
    await store.commit(given.closing())
    with pytest.raises(SessionGone):
        await store.checkpoints.roll_back(Rollback("s", "chk_1"))


async def test_of_a_rollback_and_a_message_at_the_same_time_one_is_first(store: Store) -> None:
    await idle(store)
    await take(store, 1, SlotWrite("cart", {"value": 1}))
    await store.commit(Commit("s", slots=[SlotWrite("cart", {"value": 2})]))

    done = await asyncio.gather(
        store.checkpoints.roll_back(Rollback("s", "chk_1")),
        store.accept(given.delivery("m")),
        return_exceptions=True,
    )

    [refused] = [each for each in done if isinstance(each, BaseException)] or [None]
    if refused is None:
        assert (await values(store))["cart"] == {"value": 1}
    else:
        assert isinstance(refused, SessionBusy)
        assert (await values(store))["cart"] == {"value": 2}
        assert await told(store, EventType.SESSION_ROLLED_BACK) == []
