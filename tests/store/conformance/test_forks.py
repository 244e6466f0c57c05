"""Sessions that share the first turns of another one."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import ForkRefused, IdempotencyConflict, SessionNotFound
from perdure.store.base import Store, read_all
from perdure.store.lifecycle import Forked, NewFork
from perdure.store.values import Commit, SlotWrite
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
