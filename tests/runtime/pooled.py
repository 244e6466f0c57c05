"""An agent with a tool that only some workers can run."""

import os

from perdure import Agent, tool


@tool(effects="pure", pool="gpu")
def where() -> str:
    """Say which process this is."""
    return f"process {os.getpid()}"


@tool(effects="pure")
def anywhere() -> str:
    """Say which process this is."""
    return f"process {os.getpid()}"


agent = Agent(name="pooled", model="openai-chat:scripted", tools=[where, anywhere])
