"""Row 7: the only worker is killed while many old sessions are busy, and another one starts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

from bench.plan import Plan
from bench.product import ProductSession
from bench.stack import Product
from bench.stats import quantile
from bench.table import Line, Target

#: Seconds after which every session must talk again: the heartbeat of a dead worker, the start of the next one, and
#: the histories of all active sessions, one after another.
_SOON = 30

# How many sessions grow at once.
_AT_ONCE = 50


async def measure(product: Product, plan: Plan) -> list[Line]:
    name = f"{plan.restarted} sessions, {plan.restarted_active} active, {plan.restarted_turns} turns each"
    room = asyncio.Semaphore(_AT_ONCE)

    async def grown() -> tuple[str, str]:
        async with room:
            return await product.client.grown(plan.restarted_turns)

    old = await asyncio.gather(*(grown() for _ in range(plan.restarted)))
    async with asyncio.timeout(plan.patience * 10):
        active = await asyncio.gather(
            *(product.client.again(*each, turns=plan.restarted_turns) for each in old[: plan.restarted_active])
        )
        undisturbed = await _through(active, _nothing)
        restarted = await _through(active, product.restart_worker)
    for each in active:
        await each.close()
    what = "worker killed until its next turn has ended"
    return [
        Line(name, f"{what}, p50", "s", quantile(restarted, 0.5), quantile(undisturbed, 0.5)),
        Line(name, f"{what}, the last session", "s", max(restarted), target=Target("≤", _SOON)),
    ]


async def _nothing() -> None:
    """What happens when nothing does."""


async def _through(sessions: Sequence[ProductSession], happens: Callable[[], Awaitable[None]]) -> list[float]:
    """All talk without a pause, and something happens: seconds until each is through with a turn begun after that."""
    talking = asyncio.Event()
    happened = float("inf")
    took: list[float] = []
    first_turns = len(sessions)

    async def talk(session: ProductSession) -> None:
        nonlocal first_turns
        await session.turn()
        first_turns -= 1
        if not first_turns:
            talking.set()
        begun = 0.0
        while begun < happened:
            begun = perf_counter()
            await session.turn()
        took.append(perf_counter() - happened)

    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(talk(session))
        await talking.wait()
        happened = perf_counter()
        await happens()
    return took
