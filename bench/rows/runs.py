"""Row 12: a run with one step, from the request until its result."""

import asyncio
from time import perf_counter

from bench.http import Connection
from bench.plan import Plan
from bench.stack import Product, Stack
from bench.stats import median, quantile
from bench.table import Line

NAME = "runs"


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    api = await Connection.open(product.port)

    async def run() -> float:
        begun = perf_counter()
        await api.post("/workflows/one-step?wait=result", {})
        return perf_counter() - begun

    floor, product_seconds = list[float](), list[float]()
    async with asyncio.timeout(plan.patience * plan.rounds):
        for _ in range(plan.warmup):
            await stack.floor.once()
            await run()
        # By turns, so that noise of the machine hits both.
        for _ in range(plan.rounds * plan.turns):
            floor.append(await stack.floor.once())
            product_seconds.append(await run())
    api.close()
    return [
        Line(NAME, "start → result of one step, p50", "ms", 1e3 * median(product_seconds), 1e3 * median(floor)),
        Line(
            *(NAME, "start → result of one step, p95", "ms"),
            *(1e3 * quantile(product_seconds, 0.95), 1e3 * quantile(floor, 0.95)),
        ),
    ]
