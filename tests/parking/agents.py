"""The agent of all such tests, and two beside it whose turns wait for others."""

import os

from perdure import Agent, RemoteAgent
from tests.support.chaos.agents import TOOLS, agent

_MODEL = "openai-chat:scripted"

#: Where the server itself is reached: it is its own neighbour.
REMOTE_URL = "REMOTE_URL"

helper = Agent(name="helper", model=_MODEL, description="Does as it is told.", tools=TOOLS)
away = RemoteAgent("away", os.environ.get(REMOTE_URL, "http://127.0.0.1:9"), description="Does as it is told.")
boss = Agent(name="boss", model=_MODEL, tools=TOOLS, subagents=[helper, away])
coder = Agent(name="coder", model=_MODEL, tools=TOOLS, subagents=[helper], code_mode=True)
agents = [agent, boss, coder]
