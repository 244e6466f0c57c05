"""Agents that hand work to one another."""

import asyncio

from perdure import Agent, Limits, tool

MODEL = "openai-chat:scripted"


@tool(effects="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effects="pure", approval="always")
async def pay(amount: int) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(effects="pure", approval="always")
async def ship(seconds: float) -> str:
    """Ship something, which takes some time."""
    await asyncio.sleep(seconds)
    return "shipped"


clerk = Agent(name="clerk", model=MODEL, description="Adds and pays.", tools=[add, pay])
researcher = Agent(name="researcher", model=MODEL, description="Finds things out.", tools=[add, pay], subagents=[clerk])
boss = Agent(name="boss", model=MODEL, tools=[add, pay, ship], subagents=[researcher, clerk])
hasty = Agent(name="hasty", model=MODEL, limits=Limits(turn_seconds=2), subagents=[clerk], copies_itself=False)
#: As wide and as deep as these agents want; the defaults are 32 and 3.
wide = Agent(name="wide", model=MODEL, limits=Limits(subagents_per_step=50), subagents=[clerk])
deep = Agent(name="deep", model=MODEL, limits=Limits(subagent_depth=10), copies_itself=True)

#: So little is reserved for a reply that the budget is used up by what was used.
SMALL = {"max_tokens": 5}
hand = Agent(name="hand", model=MODEL, settings=SMALL, tools=[add])
thrifty = Agent(name="thrifty", model=MODEL, settings=SMALL, limits=Limits(session_tokens=300), subagents=[hand])
agents = [boss, hasty, thrifty, wide, deep]
