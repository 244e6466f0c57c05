"""Declarations of agents that use agents: what is wrong with one says what to write instead."""

import pytest

from perdure import Agent, RemoteAgent, tool
from perdure.errors import InvalidDeclaration


@tool(effects="pure")
def look() -> str:
    """Look."""
    return "seen"


def test_an_agent_among_the_tools_belongs_to_the_subagents() -> None:
    for helper in (Agent(name="helper", tools=[look]), RemoteAgent("helper", "https://a.example")):
        with pytest.raises(InvalidDeclaration) as error:
            Agent(name="boss", tools=[helper])

        assert error.value.message == "Agent 'boss': 'helper' is an agent, not a tool: `subagents=[helper]`."


def test_a_tool_among_the_subagents_is_named_and_not_printed_whole() -> None:
    with pytest.raises(InvalidDeclaration) as error:
        Agent(name="boss", subagents=[look])  # pyright: ignore[reportArgumentType]

    assert error.value.message == (
        "Agent 'boss': 'look' is no agent; subagents is a list of agents: `subagents=[researcher]`."
    )


def test_a_subagent_named_as_the_copy_of_its_parent_says_how_to_switch_that_off() -> None:
    with pytest.raises(InvalidDeclaration, match="copies_itself=False"):
        Agent(name="boss", subagents=[Agent(name="agent")])

    assert Agent(name="boss", subagents=[Agent(name="agent")], copies_itself=False).children
