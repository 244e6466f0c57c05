"""A shop assistant: state that lasts, a tool that may fail halfway, and one that must not run twice.

PERDURE_AGENTS=examples.shop:agent PERDURE_MODEL=anthropic:claude-sonnet-4-5 make dev
"""

from pydantic import BaseModel

from perdure import Agent, Limits, SessionView, State, ToolContext, tool

PRICES = {"tea": 4.5, "milk": 1.2, "honey": 7.0}


class Cart(BaseModel):
    items: dict[str, int] = {}

    def plus(self, sku: str, count: int) -> "Cart":
        return Cart(items={**self.items, sku: self.items.get(sku, 0) + count})

    @property
    def total(self) -> float:
        return sum(PRICES[sku] * count for sku, count in self.items.items())


CART = State("cart", Cart)


@tool(effects="pure")
def price(sku: str) -> str:
    """Look up a price.

    Args:
        sku: What it is called in the shop.
    """
    return f"{PRICES[sku]:.2f}" if sku in PRICES else f"There is no {sku}; there are {', '.join(PRICES)}."


@tool(effects="idempotent", retries=2)
async def add_to_cart(ctx: ToolContext, sku: str, count: int = 1) -> Cart:
    """Put something into the cart.

    Args:
        sku: What it is called in the shop.
        count: How many of it.
    """
    if sku not in PRICES:
        raise ValueError(f"there is no {sku}")
    return await CART.update(ctx, lambda cart: cart.plus(sku, count))


# Runs at most once, as every tool does that does not say otherwise: if the process dies while it runs, the model is
# informed that the outcome is unknown, and can ask instead of ordering twice.
@tool(timeout=30)
async def order(ctx: ToolContext) -> str:
    """Order what is in the cart, and pay for it."""
    cart = await CART.get(ctx)
    if not cart.items:
        return "The cart is empty."
    # A payment service that takes idempotency keys would get this one.
    ctx.log.info("ordering for %.2f with key %s", cart.total, ctx.idempotency_key)
    await CART.set(ctx, Cart())
    return f"Ordered for {cart.total:.2f}."


def instructions(session: SessionView) -> str:
    return f"You work in a small shop and serve {session.auth.principal_id}. Say prices before you order."


agent = Agent(
    name="shop",
    description="Sells tea, milk and honey.",
    instructions=instructions,
    tools=[price, add_to_cart, order],
    limits=Limits(steps_per_turn=12, output_tokens=200_000),
)
