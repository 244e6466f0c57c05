"""Row 2: many sessions at once, each as fast as it can."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any

from bench.plan import Plan
from bench.rows.session import named
from bench.stack import Product, Stack
from bench.stats import median, quantile
from bench.table import Line, Target
from perdure.agents.agent import Turns

Take = Callable[[], Awaitable[Any]]

#: Turns per second, in those of the floor.
_FEWEST: dict[Turns, float] = {"child": 0.8, "inline": 0.55}


async def measure(stack: Stack, product: Product, plan: Plan, turns: Turns) -> list[Line]:
    name = named(f"{plan.crowd} sessions", turns)
    async with asyncio.timeout(plan.patience * (2 * plan.crowd_rounds + 2)):
        floors = [await stack.floor.session(turns) for _ in range(plan.crowd)]
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
        Line(name, "turns per second", "/s", median(rates), median(floor_rates), Target("≥", _FEWEST[turns])),
        Line(name, "turn p50", "ms", 1e3 * median(seconds)),
        Line(name, "turn p95", "ms", 1e3 * quantile(seconds, 0.95)),
    ]


async def beyond_cache(product: Product, plan: Plan, turns: Turns) -> list[Line]:
    """More busy sessions than a worker keeps in its cache, against as many as there is room for."""
    async with asyncio.timeout(plan.patience * 5):
        sessions = [await product.client.session() for _ in range(plan.busy)]
        fewer = (await _round([each.turn for each in sessions[: plan.busy_in_cache]], plan.busy_turns))[0]
        all_of_them = (await _round([each.turn for each in sessions], plan.busy_turns))[0]
        for each in sessions:
            await each.close()
    name = named(f"{plan.busy} sessions", turns)
    return [Line(name, f"turns per second / with {plan.busy_in_cache} sessions", "/s", all_of_them, fewer)]


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
