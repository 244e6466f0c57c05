"""The next build of the shop: its carts count."""

from perdure import Agent, State, ToolContext, tool


def counted(cart: list[str]) -> dict[str, int]:
    return {sku: cart.count(sku) for sku in cart}


CART = State("cart", dict[str, int], version=2, migrate={1: counted})


@tool
async def add(ctx: ToolContext, sku: str) -> dict[str, int]:
    """Put something into the cart."""
    return await CART.update(ctx, lambda cart: {**cart, sku: cart.get(sku, 0) + 1})


agent = Agent(name="shop", tools=[add])
