"""Agents whose turns have every kind of span."""

import asyncio

from perdure import Agent, tool

MODEL = "openai-chat:scripted"


@tool(effects="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effects="pure")
async def explode(fuse: str) -> str:
    """Fail."""
    raise ValueError(f"the fuse {fuse} has burnt")


@tool(effects="pure", approval="always")
async def pay(amount: int) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(effects="pure")
async def linger(seconds: float) -> str:
    """Take some time."""
    await asyncio.sleep(seconds)
    return "lingered"


clerk = Agent(name="clerk", model=MODEL, description="Adds.", instructions="You are the clerk.", tools=[add])
boss = Agent(
    name="boss", model=MODEL, instructions="You are a walrus.", tools=[add, explode, pay, linger], subagents=[clerk]
)
agents = [boss]
