"""Row 2: many sessions at once, each as fast as it can."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any

from bench.plan import Plan
from bench.stack import Product, Stack
from bench.stats import median, quantile
from bench.table import Line, Target

NAME = "crowd"

Take = Callable[[], Awaitable[Any]]


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    name = f"{plan.crowd} sessions"
    async with asyncio.timeout(plan.patience * (2 * plan.crowd_rounds + 2)):
        floors = [await stack.floor.session() for _ in range(plan.crowd)]
        sessions = await asyncio.gather(*(product.client.session() for _ in range(plan.crowd)))
        await _round([each.turn for each in floors], 1)
        floor_rates, rates, seconds = list[float](), list[float](), list[float]()
        for _ in range(plan.crowd_rounds):
            floor_rates.append((await _round([each.turn for each in floors], plan.crowd_turns))[0])
            rate, took = await _round([each.turn for each in sessions], plan.crowd_turns)
            rates.append(rate)
            seconds += took
        for each in (*floors, *sessions):
            await each.close()
    return [
        Line(name, "turns per second", "/s", median(rates), median(floor_rates), Target("≥", 0.7)),
        Line(name, "turn p50", "ms", 1e3 * median(seconds)),
        Line(name, "turn p95", "ms", 1e3 * quantile(seconds, 0.95)),
    ]


async def _round(takes: Sequence[Take], turns: int) -> tuple[float, list[float]]:
    """Turns per second of all together, and the seconds that each turn took."""
    seconds: list[float] = []

    async def drive(take: Take) -> None:
        for _ in range(turns):
            begun = perf_counter()
            await take()
            seconds.append(perf_counter() - begun)

    begun = perf_counter()
    await asyncio.gather(*(drive(take) for take in takes))
    return len(seconds) / (perf_counter() - begun), seconds
