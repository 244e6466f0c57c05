"""Row 1: one session, one turn after the other."""

import asyncio
from time import perf_counter

from bench import consumption
from bench.plan import Plan
from bench.product import ProductSession, Turn
from bench.stack import Product, Stack
from bench.stats import median, quantile
from bench.table import Line, Target
from perdure.agents.agent import Turns

#: What a turn may take, in p50s of the floor.
_SLOWEST: dict[Turns, float] = {"child": 1.3, "inline": 1.8}
#: Milliseconds of processor time of a turn, and of a turn with one tool call.
_CPU, _TOOL = 13, 24


async def measure(stack: Stack, product: Product, plan: Plan, turns: Turns) -> list[Line]:
    name = named("one session", turns)
    floor, session = await stack.floor.session(turns), await product.client.session()
    floor_seconds: list[float] = []
    taken: list[Turn] = []
    parts = {"Temporal": stack.temporal, "worker": product.worker, "API": product.api}
    used = dict.fromkeys(parts, 0.0)
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
            before = {part: consumption.of(pid).cpu for part, pid in parts.items()}
            taken += [await session.turn() for _ in range(plan.turns)]
            for part, pid in parts.items():
                used[part] += consumption.of(pid).cpu - before[part]
        with_tool = [(await session.turn("rounds 1")).waiting for _ in range(plan.turns)]
    delays = await _delays(session, plan)
    await floor.close()
    await session.close()
    cpu = {part: 1e3 * seconds / len(taken) for part, seconds in used.items()}
    return [
        *_of_text_turns(name, floor_seconds, taken, _SLOWEST[turns]),
        *(Line(name, f"processor time of a turn, {part}", "ms", spent) for part, spent in cpu.items()),
        Line(name, "processor time of a turn", "ms", sum(cpu.values()), target=_only(turns, _CPU)),
        Line(name, "turn with one tool call, p50", "ms", 1e3 * median(with_tool), target=_only(turns, _TOOL)),
        Line(name, f"token delay at {plan.tokens_per_second} tokens/s, p50", "ms", 1e3 * median(delays), target=_SOON),
        Line(name, f"token delay at {plan.tokens_per_second} tokens/s, p95", "ms", 1e3 * quantile(delays, 0.95)),
    ]


_SOON = Target("≤", 20)


def named(row: str, turns: Turns) -> str:
    return row if turns == "child" else f"{row}, {turns}"


def _only(turns: Turns, most: float) -> Target | None:
    return Target("≤", most) if turns == "inline" else None


async def _delays(session: ProductSession, plan: Plan) -> list[float]:
    """Seconds from the moment at which the provider sent a token until the reader had it; each token says when."""
    session.texts.clear()
    await session.turn(f"tokens {plan.tokens} {plan.tokens_per_second}")
    return [came - float(sent) for came, text in session.texts for sent in text.split()]


def _of_text_turns(name: str, floor: list[float], turns: list[Turn], slowest: float) -> list[Line]:
    waiting = [turn.waiting for turn in turns]
    first = [turn.first_delta for turn in turns]
    return [
        Line(name, "turn p50", "ms", 1e3 * median(waiting), 1e3 * median(floor), Target("≤", slowest)),
        Line(name, "turn p95", "ms", 1e3 * quantile(waiting, 0.95), 1e3 * quantile(floor, 0.95), Target("≤", 2.0)),
        Line(name, "first delta p50", "ms", 1e3 * median(first)),
        Line(name, "first delta p95", "ms", 1e3 * quantile(first, 0.95)),
    ]
