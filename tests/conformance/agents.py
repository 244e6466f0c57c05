"""The agents that official clients talk to. What the model does is said by the message (tests/support/script)."""

from perdure import Agent, tool


@tool(effects="pure")
def weather(city: str) -> dict[str, str]:
    """Say how the weather is."""
    return {"city": city, "sky": "clear"}


@tool(effects="pure")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken() -> str:
    """Never work."""
    raise RuntimeError("out of order")


concierge = Agent(
    name="concierge",
    model="openai-chat:scripted",
    description="Answers as scripted.",
    instructions="Do as the script says.",
    tools=[weather, add, broken],
)
clerk = Agent(name="clerk", model="openai-chat:scripted", instructions="Do as the script says.")
