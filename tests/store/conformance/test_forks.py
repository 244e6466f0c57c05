"""Sessions that share the first turns of another one."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import ForkRefused, IdempotencyConflict, SessionNotFound
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.lifecycle import Forked, NewFork, Restoration
from perdure.store.values import Commit, NewRecord, SlotWrite
from tests.store.conformance.conftest import OF_NO_SESSION, Database
from tests.support import given


async def play(store: Store, turn: int, session_id: str = "s", **slots: int) -> None:
    """One turn with a record of its own; `slots` are written while it runs."""
    await store.commit(given.running(turn, session_id))
    writes = [SlotWrite(name, {"n": value}) for name, value in slots.items()]
    await store.commit(Commit(session_id, records=[given.record(turn=turn, of=session_id)], slots=writes))
    await store.commit(given.ending(turn, session_id))


async def fork(store: Store, turn: int, *, parent: str = "s", to: str = "f") -> Forked:
    return await store.fork(NewFork(to, f"token of {to}", parent, turn))


async def owners(store: Store, session_id: str) -> list[object]:
    """The sessions whose turns this one sees, in the order of the turns."""
    return [record.body["of"] for record in await store.records(session_id)]


async def test_a_fork_sees_the_turns_up_to_its_boundary_and_its_own(store: Store) -> None:
    for turn in range(3):
        await play(store, turn)

    await fork(store, 1)
    await play(store, 3)
    await play(store, 2, "f")

    assert await owners(store, "f") == ["s", "s", "f"]
    assert await owners(store, "s") == ["s"] * 4
    assert [record.turn for record in await store.records("f", from_turn=1, to_turn=2)] == [1, 2]


async def test_a_fork_of_a_fork_sees_the_turns_of_both(store: Store) -> None:
    for turn in range(4):
        await play(store, turn)
    await fork(store, 1)
    for turn in (2, 3):
        await play(store, turn, "f")

    await fork(store, 2, parent="f", to="g")
    await fork(store, 0, parent="f", to="h")
    await play(store, 3, "g")
    await play(store, 1, "h")

    assert await owners(store, "g") == ["s", "s", "f", "g"]
    assert await owners(store, "h") == ["s", "h"]


async def test_an_outline_has_the_bodies_that_may_end_the_turn(store: Store) -> None:
    formats = {
        "delivery/0": "perdure/delivery/1",
        "end": "perdure/failure/1",
        "park": "perdure/park/1",
        "resume": "perdure/resumption/1",
        "outcome/a": "perdure/outcome/1",
        "reply": "pydantic-ai/2",
    }
    for turn in (0, 1):
        for step in (0, 1):
            found = [
                replace(given.record(key, turn=turn, step=step, n=1), format=each) for key, each in formats.items()
            ]
            await store.commit(Commit("s", records=found))
        await store.commit(given.running(turn))
        await store.commit(given.ending(turn))
    await fork(store, 1)
    await fork(store, 0, parent="f", to="g")

    for session_id, turn in (("s", 0), ("s", 1), ("f", 1), ("g", 0)):
        outline = await store.outline(session_id, turn)
        records = await store.records(session_id, from_turn=turn, to_turn=turn)
        places = [(each.turn, each.step, each.key, each.format, each.at) for each in outline]
        assert places == [(each.turn, each.step, each.key, each.format, each.at) for each in records]
        with_bodies = [(each.step, each.key) for each in outline if each.body]
        assert with_bodies == [(0, "end"), (0, "park"), (0, "resume"), *((1, key) for key in ENDS)]
        assert all(each.body in ({}, {"n": 1}) for each in outline)
    # The fork's own record of a shared turn is none, and turns after its boundary are not shared.
    assert await store.outline("g", 1) == []


ENDS = ("end", "park", "reply", "resume")


async def test_a_fork_is_a_session_of_its_own(store: Store) -> None:
    await play(store, 0)

    assert await fork(store, 0) == Forked("f", fresh=True)

    row = await store.session("f")
    parent = await store.session("s")
    assert row is not None
    assert parent is not None
    assert (row.status, row.turns, row.events, row.usage) == ("waiting", 1, 1, replace(parent).usage)
    assert (row.forked_from, row.forked_turns) == ("s", 1)
    assert (row.agent, row.mode, row.principal) == (parent.agent, parent.mode, parent.principal)
    assert await store.route("token of f") == "f"
    (event,) = [event async for event in read_all(store, "f")]
    assert (event.type, event.index, event.data) == (
        "session.forked",
        0,
        {"parent": {"sessionId": "s", "turn": 0}},
    )


async def test_the_rows_of_a_fork_do_not_grow_with_the_session(store: Store, database: Database) -> None:
    async def rows_of_fork(turn: int) -> int:
        await fork(store, turn, to="f")
        tables = [table for table in database.tables() if table not in OF_NO_SESSION]
        counted = [database.run(f"SELECT COUNT(*) FROM {table} WHERE session_id = 'f'") for table in tables]  # pyright: ignore[reportArgumentType]
        for table in tables:
            database.run(f"DELETE FROM {table} WHERE session_id = 'f'")  # pyright: ignore[reportArgumentType]
        return sum(rows[0][0] for rows in counted)

    await play(store, 0, cart=1)
    few = await rows_of_fork(0)
    for turn in range(1, 20):
        await play(store, turn, cart=turn)

    assert await rows_of_fork(19) == await rows_of_fork(0) == few


async def test_a_fork_has_the_slots_of_its_boundary(store: Store) -> None:
    await play(store, 0)
    await play(store, 1, cart=1)
    await play(store, 2, cart=2, name=7)
    await play(store, 3, cart=3)
    for turn in range(4):
        await fork(store, turn, to=f"f{turn}")

    async def slots(session_id: str) -> dict[str, object]:
        found = await store.slots(session_id, ["cart", "name"])
        return {name: slot.value and slot.value["n"] for name, slot in found.items()}

    assert await slots("f0") == {}
    assert await slots("f1") == {"cart": 1}
    assert await slots("f2") == {"cart": 2, "name": 7}
    assert await slots("f3") == {"cart": 3, "name": 7}
    # What the fork writes is its own.
    await play(store, 3, "f2", cart=9)
    assert (await slots("f2"), await slots("s")) == ({"cart": 9, "name": 7}, {"cart": 3, "name": 7})
    await fork(store, 2, parent="f2", to="g2")
    await fork(store, 1, parent="f2", to="g1")
    assert (await slots("g2"), await slots("g1")) == ({"cart": 2, "name": 7}, {"cart": 1})


async def test_state_that_older_code_wrote_is_not_guessed(store: Store, database: Database) -> None:
    await play(store, 0, cart=1)
    await play(store, 1, cart=2)
    # Older code writes the slot only.
    database.run("DELETE FROM slot_versions WHERE session_id = 's' AND turn = 1")
    await play(store, 2)

    for turn in (0, 1):
        with pytest.raises(ForkRefused) as refused:
            await fork(store, turn)
        assert refused.value.details["reason"] == "state_not_recorded"
    assert await store.session("f") is None

    # Nothing has changed it since.
    await fork(store, 2)
    assert (await store.slots("f", ["cart"]))["cart"].value == {"n": 2}


async def test_a_repeated_fork_finds_the_first_one(store: Store) -> None:
    await play(store, 0)

    def keyed(to: str, digest: str = "digest") -> NewFork:
        delivery = given.delivery(f"d of {to}", session_id=to, key="k", digest=digest, body={"kind": "fork"})
        return NewFork(to, f"token of {to}", "s", 0, delivery)

    first, second = await asyncio.gather(store.fork(keyed("f")), store.fork(keyed("g")))

    assert first.session_id == second.session_id
    assert {first.fresh, second.fresh} == {True, False}
    with pytest.raises(IdempotencyConflict):
        await store.fork(keyed("h", "other"))
    assert await store.count_unread(first.session_id) == 0


async def test_nothing_is_left_of_a_fork_without_a_parent(store: Store, database: Database) -> None:
    with pytest.raises(SessionNotFound):
        await store.fork(NewFork("f", "token", "unknown", 0, given.delivery(session_id="f", key="k")))

    assert database.run("SELECT 1 FROM deliveries WHERE session_id = 'f'") == []


async def test_code_without_forks_cannot_take_a_fork_for_a_session_without_a_past(
    store: Store, database: Database
) -> None:
    await play(store, 0)
    await fork(store, 0)

    # What such code reads of the fork, by the query of the version before.
    found = database.run("SELECT turn, step, slot, format FROM records WHERE session_id = 'f'")

    assert [tuple(row) for row in found] == [(0, 0, "delivery/0", "perdure/fork/1")]


# --- between the steps of a turn ------------------------------------------------------------------------------


async def play_steps(store: Store, turn: int, carts: list[int | None], session_id: str = "s") -> None:
    """One turn with a record for each step; each writes the slot `cart`, or nothing."""
    await store.commit(given.running(turn, session_id))
    for step, cart in enumerate(carts):
        writes = [] if cart is None else [SlotWrite("cart", {"n": cart})]
        record = given.record(turn=turn, step=step, of=session_id, step_of=step)
        await store.commit(Commit(session_id, records=[record], slots=writes))
    await store.commit(given.ending(turn, session_id))


async def fork_after(store: Store, turn: int, step: int, *, parent: str = "s", to: str = "f") -> None:
    cut = NewRecord(turn, step, "cut", "test/1", {"of": to})
    await store.fork(NewFork(to, f"token of {to}", parent, turn, step=step, cut=cut))


async def places(store: Store, session_id: str) -> list[tuple[int, int, str, object]]:
    return [(each.turn, each.step, each.key, each.body["of"]) for each in await store.records(session_id)]


async def cart(store: Store, session_id: str) -> object:
    found = (await store.slots(session_id, ["cart"])).get("cart")
    return found and found.value and found.value["n"]


async def test_a_fork_after_a_step_has_the_turn_up_to_it(store: Store) -> None:
    await play_steps(store, 0, [None])
    await play_steps(store, 1, [None, None, None])

    await fork_after(store, 1, 1)
    await play(store, 2)
    await play(store, 2, "f")

    assert await places(store, "f") == [
        (0, 0, "reply", "s"),
        (1, 0, "reply", "s"),
        (1, 1, "cut", "f"),
        (1, 1, "reply", "s"),
        (2, 0, "reply", "f"),
    ]
    row = await store.session("f")
    assert row is not None
    assert (row.turns, row.forked_from, row.forked_turns, row.fork_place) == (3, "s", 1, {"turn": 1, "step": 1})
    (event, *_) = [event async for event in read_all(store, "f")]
    assert event.data == {"parent": {"sessionId": "s", "turn": 1, "step": 1}}


async def test_a_fork_after_a_step_of_the_first_turn_shares_nothing_by_reference(store: Store) -> None:
    await play_steps(store, 0, [None, None])

    await fork_after(store, 0, 0)

    assert await places(store, "f") == [(0, 0, "cut", "f"), (0, 0, "reply", "s")]


async def test_forks_of_a_fork_after_a_step_see_its_cut_turn(store: Store) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [2, 3, 4])
    await fork_after(store, 1, 1)
    await play_steps(store, 2, [9, 10], "f")

    await fork(store, 1, parent="f", to="whole")
    await fork_after(store, 1, 0, parent="f", to="half")
    await fork_after(store, 0, 0, parent="f", to="first")
    await fork_after(store, 2, 0, parent="f", to="later")

    cut = [(0, 0, "reply", "s"), (1, 0, "reply", "s"), (1, 1, "cut", "f"), (1, 1, "reply", "s")]
    assert await places(store, "whole") == cut
    assert await places(store, "half") == [*cut[:1], (1, 0, "cut", "half"), (1, 0, "reply", "s")]
    assert await places(store, "first") == [(0, 0, "cut", "first"), (0, 0, "reply", "s")]
    assert await places(store, "later") == [*cut, (2, 0, "cut", "later"), (2, 0, "reply", "f")]
    assert [await cart(store, each) for each in ("whole", "half", "first", "later")] == [3, 2, 1, 9]


@pytest.mark.parametrize(("step", "then"), [(0, 1), (1, 5), (2, 5), (3, 7)])
async def test_a_fork_after_a_step_has_the_slots_of_that_step(store: Store, step: int, then: int) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [None, 5, None, 7, None])
    await play_steps(store, 2, [8])

    await fork_after(store, 1, step)

    assert await cart(store, "f") == then
    # What it writes is its own, and what comes later in the turn of its parent is not.
    await play_steps(store, 2, [20], "f")
    await fork(store, 1, parent="f", to="again")
    assert (await cart(store, "again"), await cart(store, "s")) == (then, 8)


async def test_several_writes_of_a_step_count_as_one(store: Store) -> None:
    await play_steps(store, 0, [1, 2])
    await store.commit(given.running(1))
    for number in (3, 4):
        # Calls of one reply.
        record = given.record(f"call/{number}", turn=1, step=0, of="s")
        await store.commit(Commit("s", records=[record], slots=[SlotWrite("cart", {"n": number})]))
    await store.commit(Commit("s", records=[given.record(turn=1, step=1, of="s")], slots=[SlotWrite("cart", {"n": 5})]))
    await store.commit(given.ending(1))

    await fork_after(store, 1, 0)

    assert await cart(store, "f") == 4


async def test_state_of_a_step_that_older_code_wrote_is_not_guessed(store: Store, database: Database) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [2, 3, 4])
    # Older code records what a turn has left, and not its steps.
    database.run("DELETE FROM slot_steps WHERE session_id = 's' AND turn = 1 AND step = 1")

    for step in (0, 1):
        with pytest.raises(ForkRefused) as refused:
            await fork_after(store, 1, step)
        assert refused.value.details["reason"] == "state_not_recorded"
    assert await store.session("f") is None
    assert await store.records("f") == []
    await fork(store, 1)
    assert await cart(store, "f") == 4


async def test_a_fork_after_a_step_outlives_its_parents(store: Store) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [2, 3, 4])
    await play_steps(store, 2, [5])
    await fork_after(store, 1, 1, to="f")
    await fork(store, 2, to="g")
    await fork(store, 1, parent="f", to="ff")
    before = {each: (await places(store, each), await cart(store, each)) for each in ("f", "g", "ff")}

    for gone in ("s", "f"):
        await store.commit(given.closing(gone))
        await store.begin_deletion(gone)
        while not await store.purge(gone, 2):
            pass
        assert await store.session(gone) is None

    # Where they were forked was a place in their first parent.
    rows = [await store.session(each) for each in ("g", "ff")]
    assert [(row and row.forked_from, row and row.fork_place) for row in rows] == [("ff", None), (None, None)]
    for each in ("g", "ff"):
        assert (await places(store, each), await cart(store, each)) == before[each]
    # And they are forked where they could be.
    await fork_after(store, 1, 0, parent="ff", to="fff")
    await fork_after(store, 1, 1, parent="g", to="gg")
    assert (await cart(store, "fff"), await cart(store, "gg")) == (2, 3)
    assert [each[2] for each in await places(store, "gg")] == ["reply", "reply", "cut", "reply"]


async def test_a_restore_is_before_the_steps_of_the_next_turn(store: Store) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [2])
    await store.restore(Restoration("s", "OPERATOR", kept=0))
    await play_steps(store, 2, [None, 7, None])

    await fork_after(store, 2, 0)
    await fork_after(store, 2, 1, to="g")

    assert (await cart(store, "f"), await cart(store, "g")) == (1, 7)


async def test_state_that_code_without_any_record_wrote_after_a_step_is_not_guessed(
    store: Store, database: Database
) -> None:
    await play_steps(store, 0, [1, None])
    # The oldest code that works with this schema writes the slot only: here in the second step.
    database.run("UPDATE slots SET version = 2, value = '{\"n\":2}' WHERE session_id = 's'")
    await play_steps(store, 1, [None])

    for step in (0, 1):
        with pytest.raises(ForkRefused) as refused:
            await fork_after(store, 0, step)
        assert refused.value.details["reason"] == "state_not_recorded"


async def test_a_restore_of_a_turn_that_runs_comes_after_its_steps(store: Store) -> None:
    await play_steps(store, 0, [1])
    await play_steps(store, 1, [2])
    await store.commit(given.running(2))
    await store.commit(Commit("s", records=[given.record(turn=2, of="s")], slots=[SlotWrite("cart", {"n": 3})]))
    await given.attend(store)
    await store.restore(Restoration("s", "OPERATOR", kept=0))
    for step in (1, 2):
        record = given.record(turn=2, step=step, of="s")
        await store.commit(Commit("s", records=[record], slots=[SlotWrite("cart", {"n": 10 + step})]))

    for step in (0, 1):
        await fork_after(store, 2, step, to=f"f{step}")

    assert [await cart(store, each) for each in ("f0", "f1")] == [1, 11]


async def test_a_fork_that_shares_nothing_any_more_has_no_parent(store: Store) -> None:
    await play_steps(store, 0, [1, 2])
    await fork_after(store, 0, 0, to="f")
    await play_steps(store, 1, [3], "f")
    await fork(store, 1, parent="f", to="g")
    await store.commit(given.closing("f"))
    await store.begin_deletion("f")
    while not await store.purge("f", 100):
        pass

    row = await store.session("g")
    assert row is not None
    assert (row.forked_from, row.forked_turns, row.fork_place) == (None, 0, None)
    assert [place[:2] for place in await places(store, "g")] == [(0, 0), (0, 0), (1, 0)]


async def test_a_fork_of_the_whole_turn_may_name_its_last_step(store: Store) -> None:
    await play_steps(store, 0, [1, 2])

    await store.fork(NewFork("f", "token of f", "s", 0, step=1))

    row = await store.session("f")
    assert row is not None
    assert (row.forked_turns, row.fork_place) == (1, {"turn": 0, "step": 1})
    assert await cart(store, "f") == 2
