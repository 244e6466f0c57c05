"""Agents that a deployment serves, and one that the next deployment has dropped."""

from perdure import Agent, tool


@tool(effects="pure")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effects="idempotent", approval="always")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


#: One for each way in which a provider can be spoken to.
providers = [
    Agent(name="chat", model="openai-chat:scripted", instructions="Be brief.", tools=[add, pay]),
    Agent(name="responses", model="openai:gpt-5-scripted", instructions="Be brief.", tools=[add, pay]),
    Agent(name="anthropic", model="anthropic:claude-scripted", instructions="Be brief.", tools=[add, pay]),
]
kept = Agent(name="kept", model="openai-chat:scripted")
dropped = Agent(name="dropped", model="openai-chat:scripted")
