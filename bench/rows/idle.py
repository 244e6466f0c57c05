"""Row 5: many parked sessions without deliveries."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bench import consumption
from bench.plan import Plan
from bench.stack import Product
from bench.table import Line, Target

# How many sessions are started at once.
_AT_ONCE = 20
# Looks, at most, until it is quiet; and the share of a processor that counts as quiet.
_SETTLING = 20
_QUIET = 0.02


async def measure(product: Product, plan: Plan) -> list[Line]:
    name = f"{plan.parked} parked"
    pids = (product.worker, product.api)
    async with asyncio.timeout(plan.patience * 5):
        await in_crowds(product.client.parked, plan.parked_warmup)
        before = await settled(pids, plan)
        await in_crowds(product.client.parked, plan.parked)
        after = await settled(pids, plan)
        cpu = consumption.of_all(pids).cpu
        await asyncio.sleep(plan.idle_seconds)
        share = 100 * (consumption.of_all(pids).cpu - cpu) / plan.idle_seconds
    each = (after.rss - before.rss) / plan.parked / 2**10
    return [
        Line(name, f"worker + API, processor over {plan.idle_seconds:g} s", "%", share, target=Target("≤", 1)),
        Line(name, "worker + API, resident memory", "MiB", after.rss / 2**20, before.rss / 2**20, Target("≤", 1.1)),
        Line(name, "resident memory per parked session", "KiB", each),
    ]


async def in_crowds(park: Callable[[], Awaitable[Any]], count: int) -> None:
    """Do it so many times, a few at once."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one() -> None:
        async with room:
            await park()

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())


async def settled(pids: tuple[int, ...], plan: Plan) -> consumption.Consumption:
    """Wait until the processes are through with what they were asked to do."""
    span = min(1.0, plan.idle_seconds)
    for _ in range(_SETTLING):
        before = consumption.of_all(pids)
        await asyncio.sleep(span)
        now = consumption.of_all(pids)
        if now.cpu - before.cpu <= _QUIET * span:
            return now
    return consumption.of_all(pids)
