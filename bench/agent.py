"""The agents that are measured."""

from typing import Any

from perdure.agents import Agent, Limits, Planning, RunContext, run, tool


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

helper = Agent(name="helper", description="Says hello.", instructions="You are measured.")
#: One that hands work on, with more calls at once than it might by default.
boss = Agent(
    name="boss",
    instructions="You are measured.",
    tools=[nothing],
    subagents=[helper],
    limits=Limits(subagents_per_step=50, repeated_calls=None),
)
#: One whose model writes programs.
coder = Agent(name="coder", instructions="You are measured.", tools=[nothing], code_mode=True)
#: One that plans.
planner = Agent(
    name="planner",
    instructions="You are measured.",
    tools=[nothing],
    planning=Planning(),
    limits=Limits(repeated_calls=None),
)


@run(name="one-step")
async def one_step(ctx: RunContext, _: dict[str, Any]) -> str:
    """Do nothing, in one step."""
    return await ctx.step("nothing", nothing.function)


#: An agent is always needed.
jobs = [agent, one_step]
