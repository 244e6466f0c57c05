"""An agent that hands work to another one, and a run that does so."""

from typing import Any

from perdure import Agent, RunContext, ToolContext, run, tool


@tool(effects="idempotent")
async def remember(ctx: ToolContext, about: str, facts: list[str]) -> str:
    """Have the clerk note the facts.

    Args:
        about: What they are about.
        facts: The facts.
    """
    receipts = [await ctx.dispatch("clerk", about, f"say {fact}") for fact in facts]
    return " ".join(receipt.delivery_id for receipt in receipts)


host = Agent(name="host", model="openai-chat:scripted", tools=[remember])
clerk = Agent(name="clerk", model="openai-chat:scripted")


@run(name="noting")
async def noting(ctx: RunContext, given: Any) -> Any:
    receipt = await ctx.dispatch("clerk", given["about"], given["facts"])
    return receipt.model_dump(mode="json")


served = [host, clerk, noting]
