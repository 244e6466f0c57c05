"""An agent that lives on the same task queues as another one, in workers that know nothing of that one."""

from perdure import Agent

agent = Agent(name="stranger", model="openai-chat:scripted", instructions="Do as the script says.")
