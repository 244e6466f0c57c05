"""The agents of the client's tests. What the model does is said by the message (tests/support/script)."""

import asyncio

from perdure import Agent, responders, tool


@tool(effects="pure")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effects="pure")
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@tool
def broken() -> str:
    """Never work."""
    raise RuntimeError("out of order")


@tool(effects="pure")
def hostile() -> str:
    """Give a result that is written for terminals."""
    return "\x1b[2J\x1b]0;owned\x07fine\u202e"


@tool(effects="idempotent", approval="always", summary=lambda arguments: f"Pay {arguments['amount']}")
def pay(amount: int, to: str = "ada") -> str:
    """Pay somebody."""
    return f"Paid {amount} to {to}."


@tool(approval="always", responders=responders.principals("api-key:ann", "api-key:bob", quorum=2))
def agree() -> str:
    """Do what two must agree to."""
    return "agreed"


clerk = Agent(name="clerk", model="openai-chat:scripted", description="Pays.", tools=[pay])
agent = Agent(
    name="concierge",
    model="openai-chat:scripted",
    description="Answers as scripted.",
    instructions="Do as the script says.",
    tools=[add, wait, broken, hostile, pay, agree],
    subagents=[clerk],
)
