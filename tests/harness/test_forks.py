"""What a fork does with the calls of its past, and with those of its own."""

from perdure import ToolContext, tool
from perdure.harness.rebuild import boundary_problem, is_cut_by, read_end
from perdure.protocol.deliveries import LOCAL, DeliveryBody, DeliveryRef
from perdure.protocol.requests import Failure
from perdure.store.deliveries import NewDelivery
from perdure.store.lifecycle import NewFork
from perdure.testing import call
from tests.support.lab import SESSION, Lab, lab


async def test_a_fork_repeats_no_effect_and_shares_no_key() -> None:
    keys: list[str] = []

    @tool(effects="idempotent")
    def pay(ctx: ToolContext, amount: int) -> str:
        """Pay."""
        keys.append(ctx.idempotency_key)
        return f"paid {amount}"

    async with lab([call("pay", amount=1), "Paid.", call("pay", amount=2), call("pay", amount=2)], pay) as it:
        (ref,) = await it.calls(await it.deliver("Pay"))
        await it.tool(ref)
        await it.model(step=1)
        await it.store.fork(NewFork("f", "token of f", SESSION, 0))
        fork = Lab(it.store, it.agent, it.models.now, it.mode, it.settings, session="f")
        body = DeliveryBody(message="Again").model_dump(mode="json")
        await it.store.accept(NewDelivery("f", "again", body, LOCAL.owner))

        # The same call of the same step, in both.
        (of_parent,) = await it.calls(await it.deliver("Again"), turn=1)
        (of_fork,) = await fork.calls(DeliveryRef(id="again", token_hash="token of f"), turn=1)
        await it.tool(of_parent, turn=1)
        await fork.tool(of_fork, turn=1)

        results = [event.data for event in await it.store.events("f") if event.type == "action.result"]

    assert len(set(keys)) == len(keys) == 3
    # The call of the shared turn has its result already.
    assert len(results) == 1


async def test_a_turn_that_runs_is_a_boundary_after_each_step_that_has_ended() -> None:
    @tool(effects="pure")
    def add(amount: int) -> int:
        """Add."""
        return amount

    async def problem(it: Lab, step: int | None) -> str | None:
        found = boundary_problem(0, step, await read_end(it.store, SESSION, 0, step))
        return found and found[0]

    async with lab([call("add", amount=1), call("add", amount=2), "Done."], add) as it:
        (first,) = await it.calls(await it.deliver("Add"))
        assert await problem(it, 0) == "step_not_ended"
        await it.tool(first)
        assert [await problem(it, step) for step in (0, 1, None)] == [None, "step_not_begun", "turn_not_ended"]
        await it.model(step=1)

        assert [await problem(it, step) for step in (0, 1, 2)] == [None, "step_not_ended", "step_not_begun"]


async def test_the_last_step_of_a_turn_is_its_end() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))

        end = await read_end(it.store, SESSION, 0, 0)

    assert boundary_problem(0, 0, end) is None
    assert not is_cut_by(0, end)


async def test_a_step_that_failed_is_the_end_of_its_turn_and_the_one_before_is_a_boundary() -> None:
    @tool(effects="pure")
    def add(amount: int) -> int:
        """Add."""
        return amount

    async with lab([call("add", amount=1)], add) as it:
        (ref,) = await it.calls(await it.deliver("Add"))
        await it.tool(ref)
        await it.conclude(Failure(code="X", message="It failed."), step=1)

        found = [boundary_problem(0, step, await read_end(it.store, SESSION, 0, step)) for step in (0, 1)]

    assert found == [None, None]
