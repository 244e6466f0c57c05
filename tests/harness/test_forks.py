"""What a fork does with the calls of its past, and with those of its own."""

from perdure import ToolContext, tool
from perdure.protocol.deliveries import LOCAL, DeliveryBody, DeliveryRef
from perdure.store.lifecycle import NewFork
from perdure.store.values import NewDelivery
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
