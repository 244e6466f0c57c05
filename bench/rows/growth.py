"""Row 3: one session that grows; a turn when it is old against a turn when it was young."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from bench import histories
from bench.plan import Plan
from bench.product import ProductSession
from bench.stack import Product, Stack
from bench.stats import median
from bench.storage import bytes_used
from bench.table import Line, Target
from perdure.protocol import names

NAME = "growth"


@dataclass
class Grown:
    """Seconds of turns when young and when old; bytes of the store after some turns of the old one."""

    young: list[float] = field(default_factory=list[float])
    old: list[float] = field(default_factory=list[float])
    store: dict[int, int] = field(default_factory=dict[int, int])


async def measure(stack: Stack, product: Product, plan: Plan) -> list[Line]:
    session = await product.client.session()
    async with asyncio.timeout(plan.patience * 4 + plan.growth):
        grown = await _grow(product, session, plan)
        await session.turn(f"rounds {plan.tool_rounds}")
        # One more, so that the turn before it has ended for its driver too.
        await session.turn()
        lines = [
            _latency(grown, plan),
            *await _history(stack, session.id, plan),
            _store(grown, plan),
            await _steps(stack, session.id, plan),
        ]
    await session.close()
    return lines


async def _grow(product: Product, session: ProductSession, plan: Plan) -> Grown:
    """Take the session to its old age; there its turns alternate with those of a young one, so that noise hits both."""
    grown = Grown()
    for turn in range(1, plan.old[0]):
        await session.turn()
        if turn in _store_marks(plan):
            grown.store[turn] = bytes_used(product.database)
    young = await product.client.session()
    for _ in range(1, plan.young[0]):
        await young.turn()
    for _ in range(*plan.old):
        grown.young.append((await young.turn()).waiting)
        grown.old.append((await session.turn()).waiting)
    for _ in range(plan.old[1], plan.growth + 1):
        await session.turn()
    await young.close()
    return grown


def _latency(grown: Grown, plan: Plan) -> Line:
    old, young = median(grown.old), median(grown.young)
    return Line(NAME, f"turn p50 {_windows(plan)}", "ms", 1e3 * old, 1e3 * young, Target("≤", 1.2))


async def _history(stack: Stack, session_id: str, plan: Plan) -> list[Line]:
    runs = await histories.of_all_runs(stack.client, session_id)
    driver = {turn: size for run in runs for turn, size in histories.bytes_by_turn(run).items()}
    text_turns = plan.growth + 2
    sizes: list[float] = []
    activities: list[int] = []
    for window in (plan.young, plan.old):
        turns = {turn: await _turn(stack, session_id, turn) for turn in range(*window)}
        activities += [histories.activities(events) for events in turns.values()]
        # The turn at which the driver continued as new has no entry.
        sizes.append(mean(driver[turn] + histories.size(events) for turn, events in turns.items() if turn in driver))
    return [
        Line(NAME, f"Temporal bytes per turn {_windows(plan)}", "B", sizes[1], sizes[0], Target("≤", 1.05)),
        Line(NAME, "signals per turn", "", sum(map(histories.signals, runs)) / text_turns, target=Target("≤", 1)),
        Line(NAME, "child workflows per turn", "", _children(runs) / (text_turns + 1), target=Target("≤", 1)),
        Line(NAME, "activities per text turn", "", mean(activities), target=Target("≤", 1)),
    ]


def _children(runs: Sequence[histories.Events]) -> int:
    return sum(map(histories.children, runs))


async def _turn(stack: Stack, session_id: str, turn: int) -> histories.Events:
    return await histories.of(stack.client, names.turn_workflow(session_id, turn))


def _store_marks(plan: Plan) -> tuple[int, int, int, int]:
    """The edges of two equally long stretches, an early one and a late one; both before the young session joins in."""
    begin, end, last = plan.growth // 10, plan.growth // 2, plan.old[0] - 1
    return begin, end, last - (end - begin), last


def _store(grown: Grown, plan: Plan) -> Line:
    begin, end, late, last = _store_marks(plan)
    young = (grown.store[end] - grown.store[begin]) / (end - begin)
    old = (grown.store[last] - grown.store[late]) / (last - late)
    return Line(NAME, f"store bytes per turn, {late}–{last} / {begin}–{end}", "B", old, young, Target("≤", 1.05))


async def _steps(stack: Stack, session_id: str, plan: Plan) -> Line:
    events = await _turn(stack, session_id, plan.growth + 1)
    steps = histories.bytes_by_model_call(events)
    what = f"Temporal bytes of a tool round, {len(steps)}th / 1st of a turn"
    return Line(NAME, what, "B", steps[-1], steps[0], Target("≤", 1.05))


def _windows(plan: Plan) -> str:
    return f"{plan.old[0]}–{plan.old[1] - 1} / {plan.young[0]}–{plan.young[1] - 1}"
