"""The agents that the tests and the pictures of the console talk to: a help desk with tools of each kind."""

import asyncio
from typing import Any

from perdure import Agent, tool


@tool(effects="pure")
def find_order(number: int) -> dict[str, object]:
    """Look an order up by its number."""
    return {"number": number, "customer": "Ada Park", "total": 42.5, "status": "delivered", "items": ["kettle", "mug"]}


@tool(effects="pure")
async def track_parcel(order: int) -> str:
    """Ask the carrier where a parcel is."""
    await asyncio.sleep(0.4)
    return f"The parcel of order {order} was handed over on Tuesday at 14:20."


def _in_words(arguments: dict[str, Any]) -> str:
    return f"Refund {arguments['amount']:.2f} EUR for order {arguments['order']}"


@tool(approval="always", summary=_in_words)
def refund(order: int, amount: float, note: str = "") -> str:
    """Pay money back to a customer."""
    return f"Refunded {amount:.2f} EUR for order {order}."


@tool(effects="idempotent", approval="always")
def close_ticket(ticket: str) -> str:
    """Close a ticket."""
    return f"Ticket {ticket} is closed."


@tool(effects="pure")
def echo(text: str) -> str:
    """Give a text back."""
    return text


@tool(effects="pure", timeout=90)
async def wait(seconds: float) -> str:
    """Wait for some seconds."""
    await asyncio.sleep(seconds)
    return f"Waited {seconds} seconds."


BILLING = Agent(
    name="billing",
    description="Knows invoices and refunds.",
    instructions="Answer questions about bills.",
    tools=[find_order, refund],
)

DESK = Agent(
    name="helpdesk",
    description="Looks orders up, tracks parcels and refunds what people approve.",
    instructions="Help customers with their orders. Be brief.",
    tools=[find_order, track_parcel, refund, close_ticket, echo, wait],
    subagents=[BILLING],
)

agents = [DESK, BILLING]

#: Its replies come from the scripted provider, as slowly as a message says.
TYPIST = Agent(name="typist", model="openai-chat:scripted", instructions="Be brief.", tools=[wait])

tested = [*agents, TYPIST]
