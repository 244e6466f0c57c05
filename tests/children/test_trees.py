"""Following the children of a session."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.children.agents:agents")


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    """A session whose researcher has asked a clerk, and that has asked another clerk itself."""
    async with stack.talk() as talk:
        asked = call("researcher", message=call("clerk", message="say four"))
        await talk.create(f"{asked} and clerk {json.dumps({'message': 'say five'})}")
        assert text(await talk.until_boundary()) == "Results: Results: four five"
        yield talk


def call(name: str, **arguments: Any) -> str:
    return f"call {name} {json.dumps(arguments)}"


async def get(talk: Talk, path: str, **params: Any) -> Json:
    answer = await talk.http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def tree(talk: Talk, session_id: str) -> Json:
    return await get(talk, f"/v1/sessions/{session_id}/tree")


async def test_a_tree_shows_who_was_asked_by_whom_and_where(talk: Talk) -> None:
    shown = await tree(talk, talk.session_id)

    by_name = {each["name"]: each for each in shown["children"]}
    clerk, researcher = by_name["clerk"], by_name["researcher"]
    (last,) = researcher["children"]
    assert (shown["sessionId"], shown["agent"], shown["status"]) == (talk.session_id, "boss", "waiting")
    assert [each["agent"] for each in (clerk, researcher, last)] == ["clerk", "researcher", "clerk"]
    assert [each["status"] for each in (clerk, researcher, last)] == ["completed"] * 3
    assert {(each["turn"], each["step"]) for each in (clerk, researcher, last)} == {(0, 0)}
    assert clerk["callId"] != researcher["callId"]
    assert [clerk["children"], last["children"]] == [[], []]
    assert all(each["usage"]["inputTokens"] > 0 for each in (shown, clerk, researcher, last))
    assert "truncated" not in shown
    assert "name" not in shown


async def test_the_tree_of_a_child_begins_with_it(talk: Talk) -> None:
    (researcher,) = [
        each for each in (await tree(talk, talk.session_id))["children"] if each["name"] == "researcher"
    ]

    assert await tree(talk, researcher["sessionId"]) == researcher


async def test_a_tree_is_shown_to_the_owner_of_its_root_only(stack: Stack, talk: Talk) -> None:
    missing = await talk.http.get("/v1/sessions/unknown/tree")

    assert (missing.status_code, missing.json()["code"]) == (404, "session_not_found")


async def test_the_children_of_a_session_are_listed(talk: Talk) -> None:
    (researcher,) = (await get(talk, "/v1/sessions", parent=talk.session_id, agent="researcher"))["sessions"]
    children = (await get(talk, "/v1/sessions", parent=talk.session_id))["sessions"]
    first = await get(talk, "/v1/sessions", parent=talk.session_id, limit=1)
    second = await get(talk, "/v1/sessions", parent=talk.session_id, limit=1, cursor=first["nextCursor"])

    assert sorted(each["agent"] for each in children) == ["clerk", "researcher"]
    assert [*first["sessions"], *second["sessions"]] == children
    assert {each["parent"]["sessionId"] for each in children} == {talk.session_id}
    assert (await get(talk, "/v1/sessions", parent=researcher["sessionId"]))["sessions"][0]["agent"] == "clerk"
    assert researcher["parent"] == (await get(talk, f"/v1/sessions/{researcher['sessionId']}"))["parent"]


@pytest.mark.parametrize("prefix", ["/eve/v1", "/agents/boss/eve/v1"])
async def test_who_reads_the_root_reads_the_stream_of_each_member(talk: Talk, prefix: str) -> None:
    (researcher,) = (await get(talk, "/v1/sessions", parent=talk.session_id, agent="researcher"))["sessions"]

    lines = (await talk.http.get(f"{prefix}/session/{researcher['sessionId']}/stream")).text.splitlines()

    events = [json.loads(line) for line in lines]
    assert text(events) == "Results: four"
    assert types(events)[-1] == "session.completed"


async def test_a_stream_is_not_found_below_an_agent_that_has_nothing_to_do_with_it(talk: Talk) -> None:
    missing = await talk.http.get(f"/agents/clerk/eve/v1/session/{talk.session_id}/stream")

    assert missing.status_code == 404
