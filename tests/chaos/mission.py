"""An agent that plans, for jobs that are interrupted."""

from perdure import Agent, Planning, Progress, Prompt, Section, SessionView
from tests.support.chaos.agents import put


def _left(session: SessionView) -> str:
    return f"{len(session.plan.remaining)} steps are left." if session.plan else ""


agent = Agent(
    name="mission",
    model="openai-chat:scripted",
    instructions=Prompt(Section("Objective", "Do as the script says."), Progress(), Section("Rest", _left)),
    planning=Planning(),
    tools=[put],
)
