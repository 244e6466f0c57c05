from examples import shop, toolset
from perdure.testing import ScriptedModel, call, play


async def test_the_shop_keeps_a_cart_and_empties_it_with_the_order() -> None:
    filling = [call("add_to_cart", sku="tea", count=2), call("add_to_cart", sku="milk")]
    model = ScriptedModel([filling, "Shall I order?", call("order"), "Done."])

    played = await play(shop.agent, "Two teas and milk", "Yes", model=model)

    assert played.tool_calls[-1].output == "Ordered for 10.20."
    assert played.state(shop.CART) == shop.Cart()


async def test_the_shop_says_what_it_does_not_have() -> None:
    model = ScriptedModel([call("add_to_cart", sku="gold"), "No gold."])

    played = await play(shop.agent, "Gold", model=model)

    assert (played.tool_calls[0].status, played.tool_calls[0].output) == ("failed", "ValueError: there is no gold")


async def test_tools_of_pydantic_ai_work_as_they_are() -> None:
    model = ScriptedModel([call("area", width=2, height=3), "Six."])

    played = await play(toolset.agent, "How large?", model=model)

    assert played.tool_calls[0].output == 6.0
