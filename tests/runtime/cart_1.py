"""A shop whose carts hold names."""

from perdure import Agent, State, ToolContext, tool

CART = State("cart", list[str])


@tool
async def add(ctx: ToolContext, sku: str) -> list[str]:
    """Put something into the cart."""
    return await CART.update(ctx, lambda cart: [*cart, sku])


agent = Agent(name="shop", tools=[add])
