"""What a tool leaves behind besides its result: state, and the session's token."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from perdure import State, ToolContext, tool
from perdure.errors import TokenConflict, UnreadableState
from perdure.protocol.requests import Conclusion, Coordinates, Failure
from perdure.protocol.wire import JsonObject
from perdure.session.state import hash_token
from perdure.store.values import Commit, NewSession, SlotWrite
from perdure.testing import call
from tests.support.lab import SESSION, Lab, lab


class Basket(BaseModel):
    items: list[str] = []


BASKET = State("basket", Basket)


# --- state --------------------------------------------------------------------------------------------------


async def basket(it: Lab) -> list[str]:
    slot = (await it.store.slots(SESSION, ["basket"])).get("basket")
    return BASKET.read(slot.value if slot else None).items


async def test_parallel_updates_all_count() -> None:
    together = asyncio.Barrier(4)

    @tool
    async def add(ctx: ToolContext, item: str) -> int:
        await BASKET.get(ctx)
        await together.wait()
        made = await BASKET.update(ctx, lambda basket: Basket(items=[*basket.items, item]))
        return len(made.items)

    async with lab([[call("add", item=str(number)) for number in range(4)]], add) as it:
        refs = await it.calls(await it.deliver("Go"))

        await asyncio.gather(*(it.tool(ref) for ref in refs))

        assert sorted(await basket(it)) == ["0", "1", "2", "3"]


async def test_a_tool_reads_its_own_writes_and_a_failed_one_leaves_none() -> None:
    @tool
    async def act(ctx: ToolContext, fail: bool) -> list[str]:
        await BASKET.set(ctx, Basket(items=["tea"]))
        await BASKET.update(ctx, lambda basket: Basket(items=[*basket.items, "milk"]))
        if fail:
            raise ValueError
        return (await BASKET.get(ctx)).items

    async with lab([[call("act", fail=True), call("act", fail=False)]], act) as it:
        failing, working = await it.calls(await it.deliver("Go"))

        await it.tool(failing)
        assert await basket(it) == []
        await it.tool(working)
        assert await basket(it) == ["tea", "milk"]


async def test_plain_functions_reach_state_too() -> None:
    @tool
    def act(ctx: ToolContext) -> int:
        ctx.wait(BASKET.set(ctx, Basket(items=["tea"])))
        return len(ctx.wait(BASKET.get(ctx)).items)

    async with lab([call("act")], act) as it:
        assert (await it.run_one()).status == "completed"

        assert await basket(it) == ["tea"]


async def test_an_update_that_returns_nothing_is_refused() -> None:
    @tool
    async def act(ctx: ToolContext) -> None:
        await BASKET.update(ctx, lambda basket: basket.items.append("tea"))  # type: ignore

    async with lab([call("act")], act) as it:
        assert (await it.run_one()).status == "failed"
        assert await basket(it) == []


async def test_an_update_that_exits_when_it_is_applied_again_fails_its_call_alone() -> None:
    both, applied = asyncio.Barrier(2), 0

    def change(basket: Basket) -> Basket:
        nonlocal applied
        applied += 1
        if applied > 2:
            raise SystemExit(3)
        return Basket(items=["tea"])

    @tool
    async def add(ctx: ToolContext) -> None:
        await BASKET.get(ctx)
        await both.wait()
        await BASKET.update(ctx, change)

    async with lab([[call("add"), call("add")]], add) as it:
        refs = await it.calls(await it.deliver("Go"))

        outcomes = await asyncio.gather(*(it.tool(ref) for ref in refs))

        assert sorted(outcome.status for outcome in outcomes) == ["completed", "failed"]


# --- versions -----------------------------------------------------------------------------------------------


class Crate(BaseModel):
    items: dict[str, int] = {}


def counted(basket: Any) -> Any:
    return {"items": {name: 1 for name in basket["items"]}}


def fails(_: Any) -> Any:
    raise KeyError("secret")


CRATE = State("crate", Crate, version=2, migrate={1: counted})
BROKEN = State("broken", Crate, version=2, migrate={1: fails})


async def stored(it: Lab, name: str) -> JsonObject | None:
    slot = (await it.store.slots(SESSION, [name])).get(name)
    return slot.value if slot else None


async def store(it: Lab, name: str, value: JsonObject) -> None:
    """Write a slot as another build does."""
    await it.store.commit(Commit(SESSION, slots=(SlotWrite(name, value, None),)))


async def test_a_tool_lifts_an_older_value_and_stores_the_version_of_its_own() -> None:
    @tool
    async def add(ctx: ToolContext) -> dict[str, int]:
        before = await CRATE.get(ctx)
        await CRATE.update(ctx, lambda crate: Crate(items={**crate.items, "milk": 2}))
        return before.items

    async with lab([call("add")], add) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await store(it, "crate", {"value": {"items": ["tea"]}})

        assert (await it.tool(ref)).status == "completed"

        assert await stored(it, "crate") == {"version": 2, "data": {"items": {"tea": 1, "milk": 2}}}
        assert (await it.emitted("action.result"))[0]["result"]["output"] == {"tea": 1}


async def read_crate(ctx: ToolContext) -> Any:
    return await CRATE.get(ctx)


async def replace_crate(ctx: ToolContext) -> None:
    await CRATE.set(ctx, Crate())


async def read_nothing(ctx: ToolContext) -> None:
    """Another tool may need what this one would change."""


@pytest.mark.parametrize("act", [read_crate, replace_crate, read_nothing])
@pytest.mark.parametrize("effects", ["pure", "idempotent", "at_most_once"])
async def test_a_call_that_meets_a_newer_value_is_handed_back_before_it_has_begun(act: Any, effects: Any) -> None:
    newer: JsonObject = {"version": 3, "data": ["tea"]}
    async with lab([call("act")], tool(name="act", effects=effects)(act)) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await store(it, "crate", newer)

        for generation in (1, 2):
            with pytest.raises(UnreadableState, match="'crate' has version 3; this code reads versions 1 to 2"):
                await it.tool(ref, generation=generation)

        assert await stored(it, "crate") == newer
        assert await it.emitted("action.result") == []
        # A worker that can read it runs the call, even if it may run only once.
        await store(it, "crate", {"version": 2, "data": {"items": {"tea": 1}}})
        assert (await it.tool(ref, generation=3)).status == "completed"


async def test_a_call_whose_migrator_raises_is_handed_back_before_it_has_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[str] = []

    @tool
    async def act(ctx: ToolContext) -> None:
        ran.append("act")

    async with lab([call("act")], act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await store(it, "broken", {"value": {}})

        with pytest.raises(UnreadableState, match="'broken' of version 1 could not be lifted: KeyError"):
            await it.tool(ref)

    assert ran == []
    # Its author needs the traceback.
    assert "in fails" in caplog.text


@pytest.mark.parametrize(("effects", "status"), [("idempotent", None), ("at_most_once", "failed")])
async def test_a_value_that_becomes_newer_while_the_tool_runs_is_not_replaced(effects: Any, status: str | None) -> None:
    newer: JsonObject = {"version": 3, "data": ["tea"]}

    async def act(ctx: ToolContext) -> None:
        await store(it, "crate", newer)
        try:
            await CRATE.get(ctx)
        except Exception:
            await CRATE.set(ctx, Crate())

    async with lab([call("act")], tool(effects=effects)(act)) as it:
        (ref,) = await it.calls(await it.deliver("Go"))

        if status is None:
            with pytest.raises(UnreadableState):
                await it.tool(ref)
        else:
            # It may have had its effect, so the model is informed.
            assert (await it.tool(ref)).status == status

        assert await stored(it, "crate") == newer


async def test_an_update_that_meets_a_newer_value_at_its_commit_is_handed_back() -> None:
    newer: JsonObject = {"version": 3, "data": ["tea"]}

    @tool(effects="idempotent")
    async def act(ctx: ToolContext) -> None:
        await CRATE.update(ctx, lambda crate: Crate(items={**crate.items, "milk": 2}))
        await store(it, "crate", newer)

    async with lab([call("act")], act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))

        with pytest.raises(UnreadableState):
            await it.tool(ref)

        assert await stored(it, "crate") == newer


async def test_slots_of_one_name_in_two_agents_are_each_read_by_their_own() -> None:
    older = State("shared", Crate, version=2, migrate={1: counted})
    newer = State("shared", Crate, version=3, migrate={1: counted, 2: lambda crate: crate})

    @tool
    async def act(ctx: ToolContext) -> Any:
        assert older.version == 2
        return await newer.get(ctx)

    async with lab([call("act")], act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await store(it, "shared", {"version": 3, "data": {"items": {"tea": 3}}})

        assert (await it.tool(ref)).status == "completed"


# --- continuation tokens ------------------------------------------------------------------------------------


@tool
async def rekey(ctx: ToolContext, token: str) -> str:
    await ctx.session.set_continuation_token(token)
    return "ok"


async def test_a_new_token_is_claimed_with_the_outcome() -> None:
    async with lab([call("rekey", token="slack:42")], rekey) as it:
        outcome = await it.run_one()

        assert outcome.token_hash == hash_token("slack:42")
        assert await it.store.route(hash_token("slack:42")) == SESSION
        assert await it.store.route("first-token") is None


async def test_a_repeated_call_reports_when_its_token_was_set() -> None:
    both = [call("rekey", token="slack:1"), call("rekey", token="slack:2")]
    async with lab([both], rekey) as it:
        one, two = await it.calls(await it.deliver("Go"))
        first, second = await it.tool(one), await it.tool(two)

        # Its worker died before it could report.
        assert await it.tool(one, generation=2) == first
        assert await it.store.route(second.token_hash or "") == SESSION
        assert (first.head or 0) < (second.head or 0)


async def test_a_conclusion_reports_which_token_the_session_owns() -> None:
    """The turn may not know of the call that set it."""
    async with lab([call("rekey", token="slack:42")], rekey) as it:
        delivery = await it.deliver("Go")
        (ref,) = await it.calls(delivery)
        await it.tool(ref)
        at = Coordinates(session_id=SESSION, turn=0)
        failure = Failure(code="STEP_TIMEOUT", message="The step did not end in time.")

        concluded = await it.harness.conclude_turn(Conclusion(at=at, failure=failure, deliveries=(delivery,)))

        assert concluded.token_hash == hash_token("slack:42")


async def test_a_token_of_another_session_is_a_conflict() -> None:
    async with lab([call("rekey", token="slack:42")], rekey) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        other = await it.store.session(SESSION)
        assert other is not None
        await it.store.create_session(NewSession("s2", "tester", "task", hash_token("slack:42"), other.principal))

        with pytest.raises(TokenConflict):
            await it.tool(ref)


async def test_only_the_first_turn_may_choose_a_token() -> None:
    async with lab(["Hi", call("rekey", token="slack:42")], rekey) as it:
        await it.model(await it.deliver("Hello"))
        (ref,) = await it.calls(await it.deliver("Go"), turn=1)

        assert (await it.tool(ref, turn=1)).status == "failed"
        assert "first turn" in (await it.emitted("action.result"))[0]["result"]["output"]
