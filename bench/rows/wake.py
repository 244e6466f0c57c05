"""Row 9: the first turn of an old session on a worker that has never seen it."""

import asyncio
from time import perf_counter

from bench.plan import Plan
from bench.product import ProductSession
from bench.stack import Product
from bench.stats import median
from bench.table import Line, Target

NAME = "wake"

#: Milliseconds: a session does not answer later because its worker was replaced, or because it is old.
_SOON = 150
#: Seconds.
_PARKS_WITHIN = 1.0


async def measure(product: Product, plan: Plan) -> list[Line]:
    async with asyncio.timeout(plan.patience * 10):
        grown = {turns: await product.client.grown(turns) for turns in plan.ages}
        # The API closes connections that idle, as the first ones did while the others grew.
        sessions = {turns: await product.client.again(*each, turns=turns) for turns, each in grown.items()}
        warm = await product.client.session()
        woken = await _woken(product, warm, sessions, plan.wakes)
    for session in (warm, *sessions.values()):
        await session.close()
    youngest, oldest = plan.ages[0], plan.ages[-1]
    p50 = {turns: 1e3 * median(took) for turns, took in woken.items()}
    what = "first turn after a restart"
    return [
        *(Line(NAME, f"{what}, {turns} turns old, p50", "ms", p50[turns], target=Target("≤", _SOON)) for turns in p50),
        Line(NAME, f"{what}, {oldest} turns old / {youngest}", "ms", p50[oldest], p50[youngest], Target("≤", 1.2)),
    ]


async def _woken(
    product: Product, warm: ProductSession, sessions: dict[int, ProductSession], times: int
) -> dict[int, list[float]]:
    """Seconds of the first turn of each session on a new worker, by age; they alternate, so that noise hits all."""
    took: dict[int, list[float]] = {turns: [] for turns in sessions}
    for _ in range(times):
        for turns, session in sessions.items():
            # Readers see the end of a turn before its driver has parked. What is left to do for the driver would make
            # the new worker begin with the session at once, and read its history before the turn that is measured.
            await asyncio.sleep(_PARKS_WITHIN)
            await product.replace_worker()
            # What a process does once is not measured.
            await warm.turn()
            begun = perf_counter()
            await session.turn()
            took[turns].append(perf_counter() - begun)
    return took
