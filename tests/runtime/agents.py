"""An agent whose session can be given another token."""

from perdure import Agent, ToolContext, tool


@tool(effects="idempotent")
async def adopt(ctx: ToolContext, token: str) -> str:
    """Give the session a token of the caller's choice.

    Args:
        token: The new token.
    """
    await ctx.session.set_continuation_token(token)
    return "adopted"


agent = Agent(name="host", model="openai-chat:scripted", tools=[adopt])
