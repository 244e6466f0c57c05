"""The agents of the first build."""

from perdure import Agent, tool


@tool(effects="idempotent", approval="always")
def pay(amount: int) -> dict[str, int]:
    """Pay an amount.

    Args:
        amount: How much.
    """
    return {"paid": amount}


agents = [
    Agent(name="kept", model="openai-chat:scripted", tools=[pay]),
    Agent(name="dropped", model="openai-chat:scripted"),
]
