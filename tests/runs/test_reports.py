"""What is reported of the attempts at the function of a run: each entry is one, and ends when the run waits or ends."""

import asyncio
from typing import Any

import pytest

from perdure import RunContext
from perdure.errors import RunDiverged
from perdure.store.attempts import AttemptQuery
from tests.runs.played import PlayedRun, played
from tests.runs.test_attempts import in_time, nothing


async def ends(run: PlayedRun) -> list[tuple[int, str, str | None]]:
    """What is reported of the attempts at the function."""
    page = await run.store.attempts.list(AttemptQuery(run.id))
    return [(each.number, each.status, (each.error or {}).get("type")) for each in page.attempts]


async def test_each_entry_of_a_run_is_an_attempt_that_ends_when_the_run_waits_or_ends() -> None:
    async def waits(ctx: RunContext, _: Any) -> str:
        return await ctx.ask("How many?", options=["1", "2"])

    async with played(waits) as run:
        await run.enter()
        await run.enter()
        assert await ends(run) == [(1, "succeeded", None), (2, "succeeded", None)]

        await run.request_cancel()
        await run.enter()

        # What cancels it does not enter it.
        assert len(await ends(run)) == 2


async def test_a_run_that_raises_is_a_failed_attempt() -> None:
    async def raises(ctx: RunContext, _: Any) -> None:
        raise ValueError("no key-abcdef123456")

    async with played(raises) as run:
        await run.enter()

        assert await ends(run) == [(1, "failed", "ValueError")]
        [attempt] = (await run.store.attempts.list(AttemptQuery(run.id))).attempts
        assert attempt.error == {"type": "ValueError", "message": "no [redacted]"}


async def test_a_run_that_leaves_a_worker_which_stops_is_a_stopped_attempt() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        begun.set()
        await goes_on.wait()

    async def works(ctx: RunContext, _: Any) -> None:
        await ctx.step("long", long)
        await ctx.step("other", nothing)

    async with in_time(), played(works) as run:
        entered = asyncio.create_task(run.enter())
        await begun.wait()
        run.leaving.set()
        goes_on.set()
        await entered
        run.leaving.clear()
        await run.enter()

        assert await ends(run) == [(1, "cancelled", "CANCELLED"), (2, "succeeded", None)]


async def test_a_run_that_cannot_go_on_is_a_failed_attempt_and_then_another_one() -> None:
    async def one(ctx: RunContext, _: Any) -> None:
        await ctx.step("one", nothing)
        await ctx.sleep(1000)

    async def two(ctx: RunContext, _: Any) -> None:
        await ctx.step("two", nothing)

    async with played(one) as run:
        await run.enter()
        run.serve(two)
        with pytest.raises(RunDiverged):
            await run.enter()

        assert await ends(run) == [(1, "succeeded", None), (2, "failed", "RUN_DIVERGED")]
