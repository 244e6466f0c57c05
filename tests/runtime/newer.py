"""The agent of a build that can read one more kind of deliveries, as a later release may."""

from perdure import Agent
from perdure.session import state

state.KINDS["later"] = "kind-later"

agent = Agent(name="kept", model="openai-chat:scripted")
