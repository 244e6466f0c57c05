"""An agent that plans, and needs an approval."""

from perdure import Agent, Planning, tool
from tests.support import tools

pay = tool(effects="idempotent", approval="always")(tools.pay.function)

planner = Agent(name="planner", model="openai-chat:scripted", tools=[pay], planning=Planning())
