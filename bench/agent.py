"""The agent that is measured."""

from perdure.agents import Agent, Limits, tool


@tool(effects="pure")
def nothing() -> str:
    """Do nothing."""
    return "done"


@tool(effects="pure", approval="always")
def guarded() -> str:
    """Do nothing, once it is approved."""
    return "done"


agent = Agent(
    name="bench",
    instructions="You are measured.",
    tools=[nothing, guarded],
    # A turn of many rounds repeats one call.
    limits=Limits(repeated_calls=None),
)
