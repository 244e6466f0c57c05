"""State slots that the code of today cannot read."""

import pytest

from perdure import State, ToolContext, tool
from perdure.errors import UnreadableState
from perdure.protocol.events import EventType
from perdure.store.values import Commit, SlotWrite
from perdure.testing import call
from tests.support.lab import SESSION, lab

COUNTED = State("progress_counted", int)


@tool(effects="idempotent")
async def count(ctx: ToolContext) -> int:
    return await COUNTED.update(ctx, lambda now: now + 1)


async def test_an_unreadable_slot_is_discarded_for_an_agent_that_prefers_it() -> None:
    async with lab([[call("count")]], count, on_unreadable="fresh") as it:
        delivery = await it.deliver("Go")
        slots = [SlotWrite("progress_counted", {"value": "many"}), SlotWrite("progress_other", {"value": 1})]
        await it.store.commit(Commit(SESSION, slots=slots))

        for ref in await it.calls(delivery):
            await it.tool(ref)

        assert [each["result"]["output"] for each in await it.emitted(EventType.ACTION_RESULT)] == [1]
        assert await it.emitted(EventType.CHECKPOINT_DISCARDED) == [
            {"slot": "progress_counted", "reason": "UNREADABLE_STATE"}
        ]
        assert (await it.store.slots(SESSION))["progress_other"].value == {"value": 1}


async def test_a_slot_of_a_newer_version_is_never_discarded() -> None:
    async with lab([[call("count")]], count, on_unreadable="fresh") as it:
        delivery = await it.deliver("Go")
        newer = {"version": 2, "data": {"many": 1}}
        await it.store.commit(Commit(SESSION, slots=[SlotWrite("progress_counted", newer)]))
        [ref] = await it.calls(delivery)

        with pytest.raises(UnreadableState):
            await it.tool(ref)

        assert (await it.store.slots(SESSION))["progress_counted"].value == newer


async def test_an_unreadable_slot_stops_an_agent_that_waits() -> None:
    async with lab([[call("count")]], count) as it:
        delivery = await it.deliver("Go")
        await it.store.commit(Commit(SESSION, slots=[SlotWrite("progress_counted", {"value": "many"})]))
        [ref] = await it.calls(delivery)

        with pytest.raises(UnreadableState, match="progress_counted"):
            await it.tool(ref)

        assert (await it.store.slots(SESSION))["progress_counted"].value == {"value": "many"}
