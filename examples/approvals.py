"""Refunds that people agree to: who is asked, when, for how long, and what they may change.

PERDURE_AGENTS=examples.approvals:agent PERDURE_MODEL=anthropic:claude-sonnet-4-5 make dev
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from perdure import Agent, Call, Decision, SessionView, ToolContext, responders, tool


def in_words(arguments: Mapping[str, Any]) -> str:
    return f"Refund {arguments['amount']:.2f} for order {arguments['order']}"


def by_amount(call: Call, session: SessionView) -> bool | Decision:
    """Small refunds just run, large ones never do, and somebody looks at those in between."""
    amount = call.arguments["amount"]
    if amount > 1000:
        return Decision.deny("refunds of more than 1000 are made by letter")
    return Decision.ask(f"{session.auth.principal_id} asks for {amount:.2f} back. Agreed?") if amount > 20 else False


# Responders see the summary, and may approve a smaller amount. Without an answer in a day it is denied.
@tool(
    approval=by_amount,
    summary=in_words,
    responders=responders.role("support"),
    expires=timedelta(days=1),
    remind=[timedelta(hours=4), timedelta(hours=20)],
)
async def refund(ctx: ToolContext, order: str, amount: float) -> str:
    """Refund an order.

    Args:
        order: The number of the order.
        amount: How much, in euros.
    """
    ctx.log.info("refunding %.2f with key %s", amount, ctx.idempotency_key)
    return f"Refunded {amount:.2f}."


# Asked once for each address; after that, letters to it go out without asking.
@tool(approval="once", approval_key=lambda arguments: arguments["to"].lower())
def send_letter(to: str, text: str) -> str:
    """Send a letter.

    Args:
        to: The address.
        text: What it says.
    """
    return f"Sent {len(text)} characters to {to}."


agent = Agent(
    name="refunds",
    description="Refunds orders, with somebody's consent.",
    instructions="You handle refunds. Ask the user with ask_question when the order or the amount is not clear.",
    tools=[refund, send_letter],
)
