"""Row 3: one session that grows; what a turn costs when it is old against what it cost when it was young."""

import asyncio
from dataclasses import dataclass

from bench.histories import History, driver_size, history, size
from bench.plan import Plan
from bench.stack import Product, Stack
from bench.stats import median
from bench.store import bytes_used
from bench.table import Line, Target
from perdure.protocol import names

NAME = "growth"


@dataclass
class Growing:
    """What was seen at each turn, by its number."""

    seconds: dict[int, float]
    # Of the driver's history and of the store, after the turn.
    driver: dict[int, tuple[str, int]]
    store: dict[int, int]


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    session = await product.client.session()
    async with asyncio.timeout(plan.patience + plan.growth):
        seen = await _grow(stack, product, session, plan)
        young, old = (await _turn_bytes(stack, session.id, window) for window in (plan.young, plan.old))
        lines = [
            _latency(seen, plan),
            Line(NAME, "Temporal bytes per turn: turn workflow", "B", old, young, Target("≤", 1.05)),
            _driver(seen, plan),
            *_store(seen, plan),
            *await _costs(stack, session, plan),
        ]
    await session.close()
    return lines
