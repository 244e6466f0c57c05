"""Agents that hand work to agents on another server, whose address is in the environment."""

import os

from perdure import Agent, Limits, RemoteAgent, tool

MODEL = "openai-chat:scripted"


@tool(effects="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


#: How long a remote task may take, for tests that do not want to wait.
TIMEOUT = float(os.environ.get("REMOTE_TIMEOUT", "600"))


def _auth() -> str:
    return os.environ.get("REMOTE_KEY", "a key of the tests")


away = RemoteAgent(
    "away",
    os.environ.get("REMOTE_URL", "http://127.0.0.1:9"),
    description="Does things on another server.",
    headers={"x-tenant": "acme-secret-tenant"},
    auth=_auth,
    timeout=TIMEOUT,
)
near = Agent(name="near", model=MODEL, tools=[add])
boss = Agent(name="boss", model=MODEL, tools=[add], subagents=[away, near], limits=Limits(subagents_per_step=40))
agents = [boss]
#: The same agent of a later build, which knows no other server any more.
alone = Agent(name="boss", model=MODEL, tools=[add])
