"""Row 10: turns that hand work to other agents."""

import asyncio

from bench import histories
from bench.plan import Plan
from bench.stack import Product, Stack
from bench.stats import median
from bench.table import Line, Target

NAME = "children"


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    async with asyncio.timeout(plan.patience * 3):
        tool, child = await _beside_a_tool(product, plan)
        seconds, started, read = await _at_once(product, plan)
        without = await _bytes(stack, product, 0)
        sizes = {count: await _bytes(stack, product, count) - without for count in plan.children}
    one, few, most = plan.children
    early, late = ((sizes[to] - sizes[of]) / (to - of) for of, to in ((one, few), (few, most)))
    further = f"Temporal bytes of the driver for each further child, {few} to {most} / {one} to {few}"
    return [
        Line(NAME, "turn with one child / with one tool call, p50", "ms", child, tool),
        Line(NAME, f"turn with {most} children at once, p50", "ms", seconds),
        Line(NAME, "sessions started for each of them", "", started, target=Target("≤", 1)),
        Line(NAME, "results read of each of them", "", read, target=Target("≥", 1)),
        *(Line(NAME, f"Temporal bytes of the driver, {count} at once", "B", size) for count, size in sizes.items()),
        Line(NAME, further, "B", late, early, Target("≤", 1.2)),
    ]


async def _beside_a_tool(product: Product, plan: Plan) -> tuple[float, float]:
    """Milliseconds of a turn with one tool call, and of one with one child; they alternate."""
    session = await product.client.session()
    with_tool, with_child = list[float](), list[float]()
    await session.turn("rounds 1")
    await session.turn("hand 1")
    for _ in range(plan.turns):
        with_tool.append(1e3 * (await session.turn("rounds 1")).waiting)
        with_child.append(1e3 * (await session.turn("hand 1")).waiting)
    await session.close()
    return median(with_tool), median(with_child)


async def _at_once(product: Product, plan: Plan) -> tuple[float, float, float]:
    """Milliseconds of a turn with the most children; how many were started, and results read, for each call."""
    count, seconds = plan.children[-1], list[float]()
    session = await product.client.session()
    for _ in range(plan.families):
        seconds.append((await session.turn(f"hand {count}")).waiting)
    calls, counts = count * plan.families, session.counts
    await session.close()
    return 1e3 * median(seconds), counts["subagent.called"] / calls, counts["action.result"] / calls


async def _bytes(stack: Stack, product: Product, count: int) -> int:
    """The history of the driver of a session with such a turn, and one without children."""
    session = await product.client.session(f"hand {count}" if count else "hello")
    # One more, so that the turn before it has ended for its driver too.
    await session.turn()
    await session.close()
    return sum(map(histories.size, await histories.of_all_runs(stack.client, session.id)))
