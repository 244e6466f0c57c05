r"""A newsroom: an editor hands work to a researcher and a writer, each in a session of its own.

perdure dev --agents examples.newsroom:agent

The built-in demo model is enough to see it:

curl -s http://127.0.0.1:8000/eve/v1/session \
  -d '{"message": "let the researcher look up tea, then let the writer publish it"}'
perdure tail SESSION_ID --tree                # the sessions of all three; the editor's asks for what the writer needs
curl -s http://127.0.0.1:8000/v1/inputs       # what is asked, with the requestId
curl -s http://127.0.0.1:8000/v1/inputs/REQUEST_ID -d '{"optionId": "approve"}'
"""

from perdure import Agent, tool

ARCHIVE = {"tea": "Tea is the most widely drunk beverage after water.", "chess": "Chess came to Europe from Persia."}


@tool(effects="pure")
def look_up(topic: str) -> str:
    """Look a topic up in the archive."""
    found = [fact for known, fact in ARCHIVE.items() if known in topic.lower()]
    return " ".join(found) or "The archive has nothing on this."


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
