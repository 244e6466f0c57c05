"""Row 6: many sessions that wait for an approval, and how soon each continues when it comes."""

import asyncio

from bench import consumption
from bench.plan import Plan
from bench.product import Asking
from bench.stack import Product
from bench.stats import median, quantile
from bench.table import Line, Target

from .idle import in_crowds, settled

#: Milliseconds after its answer in which a session must be through with what it waited for.
_SOON = 1000


async def measure(product: Product, plan: Plan) -> list[Line]:
    name = f"{plan.parked} asking"
    pids = (product.worker, product.api)
    waiting: list[Asking] = []

    async def ask() -> None:
        waiting.append(await product.client.asking())

    async with asyncio.timeout(plan.patience * 10):
        await in_crowds(ask, plan.parked)
        await settled(pids, plan)
        cpu = consumption.of_all(pids).cpu
        await asyncio.sleep(plan.idle_seconds)
        share = 100 * (consumption.of_all(pids).cpu - cpu) / plan.idle_seconds
        # One after another: the time of one is not the others' queue.
        took = [1000 * await product.client.approve(each) for each in waiting]
    label = "answer until its turn has ended"
    return [
        Line(name, f"worker + API, processor over {plan.idle_seconds:g} s", "%", share, target=Target("≤", 1)),
        Line(name, f"{label}, p50", "ms", median(took)),
        Line(name, f"{label}, p95", "ms", quantile(took, 0.95)),
        Line(name, f"{label}, max", "ms", max(took), target=Target("≤", _SOON)),
    ]
