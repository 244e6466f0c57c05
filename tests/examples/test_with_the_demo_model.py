"""The examples do with the built-in demo model what their first lines say."""

import json
import re
from types import ModuleType

import pytest

from examples import newsroom, reports
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(agents="examples.newsroom:agent,examples.reports:agent")


async def test_the_newsroom_shows_a_family_and_asks_at_its_root(stack: Stack) -> None:
    async with stack.talk() as talk:
        answer = await talk.http.post("/eve/v1/session", json=documented(newsroom))
        session_id = answer.json()["sessionId"]
        asked = await until_boundary(talk, session_id)
        (request,) = (await talk.http.get("/v1/inputs", params={"agent": "writer"})).json()["inputs"]
        await talk.http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "approve"})
        done = await until_boundary(talk, session_id)
        tree = (await talk.http.get(f"/v1/sessions/{session_id}/tree")).json()

    assert asked[-3]["type"] == "input.requested"
    assert request["tool"] == "publish"
    assert "Published" in text(done)
    assert [(each["name"], each["status"]) for each in tree["children"]] == [
        ("researcher", "completed"),
        ("writer", "completed"),
    ]
    assert newsroom.ARCHIVE["tea"] in text(done)


async def test_a_report_is_made_by_a_program_that_the_message_brings(stack: Stack) -> None:
    async with stack.talk() as talk:
        answer = await talk.http.post("/agents/reports/eve/v1/session", json=documented(reports))
        session_id = answer.json()["sessionId"]
        events = await until_boundary(talk, session_id)

    (found,) = [event["data"]["result"] for event in events if event["type"] == "action.result"]
    (asked,) = [event["data"]["requests"] for event in events if event["type"] == "input.requested"]
    assert found["toolName"] == "find_orders"
    assert asked[0]["prompt"] == "Remind Ada of 120.00"


def documented(example: ModuleType) -> Json:
    """The body of the request in the example's first lines."""
    found = re.search(r"\{\"message\": .*\}", example.__doc__ or "")
    assert found is not None
    return json.loads(found[0])


async def until_boundary(talk: Talk, session_id: str) -> list[Json]:
    if talk.session_id != session_id:
        talk.session_id, talk.cursor = session_id, 0
    return await talk.until_boundary()
