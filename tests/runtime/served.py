"""Agents that a deployment serves, and one that the next deployment has dropped."""

from perdure import Agent, tool
from tests.support import tools


@tool(effects="pure")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


pay = tool(effects="idempotent", approval="always")(tools.pay.function)

chat = Agent(name="chat", model="openai-chat:scripted", instructions="Be brief.", tools=[add, pay])
#: One for each API of a provider.
providers = [
    chat,
    Agent(name="responses", model="openai:gpt-5-scripted", instructions="Be brief.", tools=[add, pay]),
    Agent(name="anthropic", model="anthropic:claude-scripted", instructions="Be brief.", tools=[add, pay]),
]
kept = Agent(name="kept", model="openai-chat:scripted")
dropped = Agent(name="dropped", model="openai-chat:scripted")
hasty = Agent(name="hasty", model="openai-chat:scripted", on_unreadable="fresh")
