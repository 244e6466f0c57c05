"""Row 11: a program of the model, which makes its calls one after the other, beside as many rounds of tool calls."""

import asyncio

from bench.plan import Plan
from bench.stack import Product
from bench.stats import median
from bench.table import Line

NAME = "code"


async def measure(product: Product, plan: Plan) -> list[Line]:
    session = await product.client.session("program 1")
    async with asyncio.timeout(plan.patience * 3):
        text = [1e3 * (await session.turn()).waiting for _ in range(plan.programs)]
        one = [1e3 * (await session.turn("program 1")).waiting for _ in range(plan.programs)]
        many = [1e3 * (await session.turn(f"program {plan.inner_calls}")).waiting for _ in range(plan.programs)]
    await session.close()
    # A program of one call has two stages: to its call, and to its end.
    stage = (median(many) - median(one)) / max(1, plan.inner_calls - 1)
    return [
        Line(NAME, f"turn with a program of {plan.inner_calls} calls, p50", "ms", median(many)),
        Line(NAME, "turn with a program of one call / text turn, p50", "ms", median(one), median(text)),
        Line(NAME, "stage with its call", "ms", stage),
    ]
