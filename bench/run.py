"""One run: starts what the rows need, and measures them one after the other."""

import contextlib
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from perdure.agents.agent import Turns

from . import postgres
from .plan import Plan
from .report import progress
from .rows import (
    asking,
    children,
    code,
    compaction,
    console,
    crowd,
    deliveries,
    fork,
    growth,
    idle,
    log,
    plans,
    restart,
    runs,
    session,
    wake,
    watched,
)
from .stack import Product, Stack, running
from .table import Line

#: The rows of a run that names none.
ROWS = (
    "session",
    "inline",
    "crowd",
    "inline-crowd",
    "busy",
    "growth",
    "log",
    "fork",
    "compaction",
    "idle",
    "parked",
    "wake",
    "children",
    "code",
    "plans",
    "checkpoints",
    "runs",
    "readers",
    "deliveries",
)
#: The rows by the names that `--only` takes. A restart is measured only when it is asked for, as its sessions need an
#: hour and more to grow, and so is the console, which needs a browser.
ALL = (*ROWS, "restart", "console")
#: Rows whose product runs its turns inline.
_INLINE = ("inline", "inline-crowd", "busy")
#: Rows whose product serves another agent than the usual one.
_AGENTS = {
    "children": "bench.agent:boss",
    "code": "bench.agent:coder",
    "plans": "bench.agent:planner",
    "runs": "bench.agent:jobs",
}


async def measure(plan: Plan, rows: Sequence[str] = ROWS, *, on_postgres: bool = False) -> list[Line]:
    lines: list[Line] = []
    async with _directory() as directory, contextlib.AsyncExitStack() as parts:
        database = await parts.enter_async_context(postgres.cluster(directory)) if on_postgres else None
        stack = (
            await parts.enter_async_context(running(directory))
            if not set(rows) <= {"log", "fork", "compaction", "checkpoints"}
            else None
        )
        for row in rows:
            progress(f"Measuring: {row} …")
            lines += await _row(row, plan, stack, database, directory)
    return lines


async def _row(row: str, plan: Plan, stack: Stack | None, database: str | None, directory: Path) -> list[Line]:
    if row == "log":
        return await log.measure(database or f"sqlite:///{directory / 'log.db'}", plan)
    if row == "compaction":
        return await compaction.measure(database or f"sqlite:///{directory / 'compaction.db'}", plan)
    if row == "fork":
        return await fork.measure(database or f"sqlite:///{directory / 'fork.db'}", plan)
    if row == "checkpoints":
        return await plans.of_store(database or f"sqlite:///{directory / 'checkpoints.db'}", plan)
    assert stack is not None
    # Each row has a product of its own: none inherits the caches of the row before it.
    turns: Turns = "inline" if row in _INLINE else "child"
    async with stack.product(row, database, turns, _AGENTS.get(row, "bench.agent:agent")) as product:
        return await _of_product(row, plan, stack, product, turns)


async def _of_product(row: str, plan: Plan, stack: Stack, product: Product, turns: Turns) -> list[Line]:
    match row:
        case "session" | "inline":
            return await session.measure(stack, product, plan, turns)
        case "crowd" | "inline-crowd":
            return await crowd.measure(stack, product, plan, turns)
        case "busy":
            return await crowd.beyond_cache(product, plan, turns)
        case _ if row in _WITH_FLOOR:
            return await _WITH_FLOOR[row](stack, product, plan)
        case _:
            return await _ALONE[row](product, plan)


#: What is measured of the product beside other parts of the stack, and of the product alone.
_WITH_FLOOR = {"growth": growth.measure, "children": children.measure, "runs": runs.measure}
_ALONE = {
    "idle": idle.measure,
    "parked": asking.measure,
    "wake": wake.measure,
    "code": code.measure,
    "plans": plans.measure,
    "readers": watched.measure,
    "deliveries": deliveries.measure,
    "restart": restart.measure,
    "console": console.measure,
}


@contextlib.asynccontextmanager
async def _directory() -> AsyncGenerator[Path]:
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        yield Path(name)
