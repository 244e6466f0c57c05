"""A newsroom: an editor hands work to a researcher and a writer, each in a session of its own.

Start it with `perdure dev --agents examples.newsroom:agent`.
"""

from perdure import Agent, tool

ARCHIVE = {"tea": "Tea is the most widely drunk beverage after water.", "chess": "Chess came to Europe from Persia."}


@tool(effects="pure")
def look_up(topic: str) -> str:
    """Look a topic up in the archive."""
    return ARCHIVE.get(topic, "The archive has nothing on this.")


@tool(approval="always")
def publish(headline: str) -> str:
    """Publish an article."""
    return f"Published: {headline}"


researcher = Agent(name="researcher", description="Finds facts in the archive.", tools=[look_up])
writer = Agent(name="writer", description="Writes an article from facts, and publishes it.", tools=[publish])
agent = Agent(
    name="editor",
    instructions="Let the researcher find facts, then let the writer write and publish. Do neither yourself.",
    subagents=[researcher, writer],
    copies_itself=False,
)
