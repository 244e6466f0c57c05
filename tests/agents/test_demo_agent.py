"""The agent that a new user meets."""

from perdure.agents.demo import agent
from perdure.testing import play


async def test_a_postcard_is_sent_when_somebody_has_approved_it() -> None:
    played = await play(agent, "send a postcard")
    (request,) = played.pending

    done = await played.answer("send_postcard", "approve")

    assert request.summary == "Send a postcard: “send a postcard”"
    assert done.text == "send_postcard: The postcard is on its way: send a postcard"
