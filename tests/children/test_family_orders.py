"""Orders of events in a family: what comes at the worst moment loses nothing, and nothing waits for ever."""

import pytest

from tests.support.stack import Stack
from tests.support.talk import Json, Talk, types

from .test_family_inputs import approve, asked
from .test_subagents import hand, of_type, stream_of

LONG = "drip 600 words delay 50"
SHIP = 'call ship {"seconds": 600}'


async def parked_with_a_child(talk: Talk) -> tuple[str, Json]:
    """A turn that waits for people while a child works: the child, and the request."""
    events, (request,) = await asked(talk, f"{SHIP} and " + hand(("clerk", LONG)).removeprefix("call "))
    called = of_type(events, "subagent.called") or of_type(await talk.until("subagent.called"), "subagent.called")
    return called[0]["childSessionId"], request


async def ended_first(talk: Talk, child: str, events: list[Json]) -> bool:
    """Whether the child had ended when the parent said that its turn was cancelled."""
    told = next(each for each in events if each["type"] == "turn.cancelled")
    below = await stream_of(talk, child)
    return "turn.cancelled" in types(below) and below[-1]["meta"]["at"] <= told["meta"]["at"]


async def cancel(talk: Talk) -> None:
    assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).json()["status"] == "accepted"


async def test_a_cancel_while_an_answer_is_processed_says_so_when_the_children_have_ended(talk: Talk) -> None:
    child, request = await parked_with_a_child(talk)
    await talk.send(inputResponses=approve(request))
    await talk.until("turn.started", start=talk.cursor)

    await cancel(talk)
    events = await talk.until_boundary()

    assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
    assert await ended_first(talk, child, events)
    assert "delivery.refused" not in types(events)
    assert await talk.say("say Still here") == "Still here"


@pytest.mark.parametrize("kind", ["clear", "reset"])
async def test_a_control_ends_a_turn_that_waits_for_people_when_its_children_have_ended(talk: Talk, kind: str) -> None:
    child, _ = await parked_with_a_child(talk)

    answer = await talk.http.post(f"/eve/v1/session/{talk.session_id}/{kind}", json={})
    assert answer.is_success, answer.text
    events = await talk.until_boundary()

    assert await ended_first(talk, child, events)
    if kind == "clear":
        # The control has a turn of its own.
        await talk.until_boundary()
        assert await talk.say("say Still here") == "Still here"
    else:
        assert types([event async for event in talk.events()])[-1] == "session.completed"


async def test_the_children_of_a_session_that_an_operator_ends_are_stopped(stack: Stack, talk: Talk) -> None:
    await talk.create(hand(("clerk", LONG)))
    (called,) = of_type(await talk.until("subagent.called"), "subagent.called")

    client = await stack.client()
    await client.get_workflow_handle(talk.session_id).signal("repair", {"how": "fail"})
    events = await stream_of(talk, talk.session_id)

    assert types(events)[-1] == "session.failed"
    assert "turn.cancelled" in types(await stream_of(talk, called["childSessionId"]))
