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


@tool(effects="idempotent", approval="always")
def pay(amount: int) -> dict[str, int]:
    """Pay an amount."""
    return {"paid": amount}


@tool(approval="always", summary=lambda arguments: f"Send {arguments['text']!r}", expires=3600, on_expiry="fail")
def send(text: str) -> str:
    """Send a text."""
    return f"sent {text}"


concierge = Agent(
    name="concierge",
    model="openai-chat:scripted",
    description="Answers as scripted.",
    instructions="Do as the script says.",
    tools=[weather, add, broken, pay],
)
# Takes any other message for a denial.
hasty = Agent(name="hasty", model="openai-chat:scripted", tools=[pay], while_waiting="deny")
clerk = Agent(name="clerk", model="openai-chat:scripted", instructions="Do as the script says.", tools=[send])
cashier = Agent(name="cashier", model="openai-chat:scripted", description="Pays.", tools=[pay])
foreman = Agent(name="foreman", model="openai-chat:scripted", tools=[add, pay], subagents=[cashier])
