"""Row 1: one session, text turns, one after the other."""

import asyncio
from time import perf_counter

from bench.plan import Plan
from bench.product import Turn
from bench.stack import Product, Stack
from bench.stats import median, quantile
from bench.table import Line, Target

NAME = "one session"


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    floor, session = await stack.floor.session(), await product.client.session()
    floor_seconds: list[float] = []
    turns: list[Turn] = []
    async with asyncio.timeout(plan.patience * plan.rounds):
        for _ in range(plan.warmup):
            await floor.turn()
            await session.turn()
        # By turns, so that noise of the machine hits both.
        for _ in range(plan.rounds):
            for _ in range(plan.turns):
                begun = perf_counter()
                await floor.turn()
                floor_seconds.append(perf_counter() - begun)
            turns += [await session.turn() for _ in range(plan.turns)]
    await floor.close()
    await session.close()
    return _lines(floor_seconds, turns)


def _lines(floor: list[float], turns: list[Turn]) -> list[Line]:
    waiting = [turn.waiting for turn in turns]
    first = [turn.first_delta for turn in turns]
    return [
        Line(NAME, "turn p50", "ms", 1e3 * median(waiting), 1e3 * median(floor), Target("≤", 1.4)),
        Line(NAME, "turn p95", "ms", 1e3 * quantile(waiting, 0.95), 1e3 * quantile(floor, 0.95), Target("≤", 2.0)),
        Line(NAME, "first delta p50", "ms", 1e3 * median(first)),
        Line(NAME, "first delta p95", "ms", 1e3 * quantile(first, 0.95)),
    ]
