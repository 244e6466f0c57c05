"""The agent of a build that can read one more kind of deliveries, and one more version, as a later release may."""

from perdure import Agent
from perdure.session import state

state.KINDS["later"] = "kind-later"
state.REFERENCE_VERSIONS[2] = "delivery-2"

agent = Agent(name="kept", model="openai-chat:scripted")
