"""Runs of the tests. Their effects are told to a ledger, whose address is in the environment."""

import asyncio
import json
import os
import urllib.request
from typing import Any

from pydantic import BaseModel

from perdure import Agent, RunContext, RunStepFailed, StepOutcomeUnknown, responders, run

MODEL = "openai-chat:scripted"


class Order(BaseModel):
    note: str = ""
    seconds: float = 0.0
    count: int = 3


def effect(key: str, note: str) -> str:
    """An effect outside, which the ledger writes down."""
    url = os.environ.get("LEDGER_URL")
    if url:
        content = json.dumps({"key": key, "body": {"tool": key, "note": note}}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/effect", data=content), timeout=60) as answer:
            answer.read()
    return f"{key} of {note}"


def gate(name: str) -> None:
    url = os.environ["LEDGER_URL"]
    content = json.dumps({"gate": name}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/pass", data=content), timeout=120) as answer:
        answer.read()


@run(name="nightly", input=Order)
async def nightly(ctx: RunContext, order: Order) -> dict[str, Any]:
    """Three steps, one after the other."""
    done: list[str] = []
    for number in range(order.count):
        ctx.log("info", f"step {number}", number=number)
        try:
            done.append(await ctx.step(f"step-{number}", effect, f"step-{number}", order.note))
        except StepOutcomeUnknown:
            done.append("unknown")
    return {"done": done}


async def quick(value: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return value


@run(name="fan-out")
async def fan_out(ctx: RunContext, order: Any) -> list[int]:
    """Branches side by side that make several calls each, and then wait."""

    async def branch(number: int) -> int:
        first = await ctx.step(f"first-{number}", quick, number, 0.3 / (number + 1), effects="pure")
        await asyncio.sleep(0)
        return await ctx.step(f"second-{number}", quick, first * 10, 0.05, effects="pure")

    found = await asyncio.gather(*(branch(number) for number in range(4)))
    await ctx.sleep(1)
    return [*found, await ctx.step("last", quick, 7)]


@run(name="steady", input=Order)
async def steady(ctx: RunContext, order: Order) -> int:
    """Many steps, of which one is done at each moment."""
    for number in range(order.count):
        await ctx.step("step", quick, number, order.seconds)
    return order.count


@run(name="sleeper", input=Order)
async def sleeper(ctx: RunContext, order: Order) -> list[str]:
    before = await ctx.step("before", effect, "before", order.note)
    await ctx.sleep(order.seconds)
    after = await ctx.step("after", effect, "after", order.note)
    return [before, after]


@run(name="prompter", input=Order)
async def prompter(ctx: RunContext, order: Order) -> Any:
    await ctx.step("before", effect, "before", order.note)
    return await ctx.prompt("clerk", order.note)


@run(name="talker", input=Order)
async def talker(ctx: RunContext, order: Order) -> Any:
    first = await ctx.prompt("clerk", "say One", session=order.note)
    return [first, await ctx.prompt("clerk", "say Two", session=order.note)]


@run(name="asker")
async def asker(ctx: RunContext, _: Any) -> str:
    color = await ctx.ask("Which color?", ["red", "blue"])
    return f"{color} it is"


@run(name="failing")
async def failing(ctx: RunContext, _: Any) -> Any:
    raise ValueError("This is how it fails.")


def refused() -> None:
    raise LookupError("not there")


@run(name="catching")
async def catching(ctx: RunContext, _: Any) -> Any:
    try:
        await ctx.step("refused", refused)
    except RunStepFailed as failed:
        await ctx.sleep(0.2)
        return [failed.step, failed.error, failed.message]


@run(name="stubborn")
async def stubborn(ctx: RunContext, _: Any) -> str:
    """It swallows what stops it."""
    try:
        await ctx.sleep(1)
    except BaseException:
        return "swallowed"
    return "slept"


@run(name="diverging")
async def diverging(ctx: RunContext, _: Any) -> str:
    await ctx.step(os.environ.get("STEP_NAME", "old"), quick, 1)
    await ctx.sleep(float(os.environ.get("SLEEP", "0")))
    return os.environ.get("STEP_NAME", "old")


@run(name="gated", input=Order)
async def gated(ctx: RunContext, order: Order) -> str:
    await ctx.step("gate", gate, order.note, effects="idempotent")
    return "passed"


clerk = Agent(name="clerk", model=MODEL, description="Does what it is told.")


@run(name="between", input=Order)
async def between(ctx: RunContext, order: Order) -> str:
    """An effect before a gate, and one after it."""
    await ctx.step("before", effect, "before", order.note)
    await ctx.step("gate", gate, order.note)
    return await ctx.step("after", effect, "after", order.note)


@run(name="paying")
async def paying(ctx: RunContext, order: Any) -> str:
    """Ask somebody else than the owner."""
    return await ctx.ask("Pay?", ["yes", "no"], responders=responders.principals("api-key:bob"))


agents = [
    paying,
    between,
    *(clerk, nightly, fan_out, steady, sleeper, prompter, talker, asker, failing, catching, stubborn, diverging, gated),
]
