"""Agents with limits of time and of tokens."""

from perdure import Agent, Limits, tool

MODEL = "anthropic:claude-scripted"


@tool(approval="always")
def pay(amount: int) -> str:
    raise AssertionError("this must not run")


hasty = Agent("hasty", model=MODEL, limits=Limits(turn_seconds=3))
patient = Agent("patient", model=MODEL, tools=[pay])
idle = Agent("idle", model=MODEL, tools=[pay], limits=Limits(idle_seconds=2))
thrifty = Agent("thrifty", model=MODEL, settings={"max_tokens": 5}, limits=Limits(session_tokens=25))
