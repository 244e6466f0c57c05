"""An agent whose messages are collected."""

from perdure import Agent, Lane

agent = Agent(
    name="collecting", model="openai-chat:scripted", instructions="Be brief.", lanes={"main": Lane(mode="collect")}
)
