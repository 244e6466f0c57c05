"""Following the children of a session."""

import asyncio
import hashlib
import json
import subprocess
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.dev.supervisor import command
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    keys = ",".join(f"{name}={hashlib.sha256(name.encode()).hexdigest()}" for name in ("ada", "bob"))
    return module_stack(provider=True, agents="tests.children.agents:agents", environment={"PERDURE_API_KEYS": keys})


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    """A session whose researcher has asked a clerk, and that has asked another clerk itself."""
    async with stack.talk(headers={"x-api-key": "ada"}) as talk:
        asked = call("researcher", message=call("clerk", message="say four"))
        await talk.create(f"{asked} and clerk {json.dumps({'message': 'say five'})}")
        assert text(await talk.until_boundary()) == "Results: Results: four | five"
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
    (researcher,) = [each for each in (await tree(talk, talk.session_id))["children"] if each["name"] == "researcher"]

    assert await tree(talk, researcher["sessionId"]) == researcher


async def test_a_family_is_shown_to_its_owner_only(stack: Stack, talk: Talk) -> None:
    (child, *_) = (await get(talk, "/v1/sessions", parent=talk.session_id))["sessions"]
    async with stack.talk(headers={"x-api-key": "bob"}) as bob:
        answers = [
            await bob.http.get(path)
            for session_id in (talk.session_id, child["sessionId"], "unknown")
            for path in (f"/v1/sessions/{session_id}/tree", f"/eve/v1/session/{session_id}/stream")
        ]
        listed = await get(bob, "/v1/sessions", parent=talk.session_id)

    assert {answer.status_code for answer in answers} == {404}
    assert listed == {"sessions": []}


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

    # Empty lines keep the connection open.
    events = [json.loads(line) for line in lines if line]
    assert text(events) == "Results: four"
    assert types(events)[-1] == "session.completed"


async def test_a_stream_is_not_found_below_an_agent_that_has_nothing_to_do_with_it(talk: Talk) -> None:
    missing = await talk.http.get(f"/agents/clerk/eve/v1/session/{talk.session_id}/stream")

    assert missing.status_code == 404


# --- the commands of operators ------------------------------------------------------------------------------


def perdure(stack: Stack, *words: str) -> list[str]:
    done = subprocess.run(
        command(*words), env=stack.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def test_an_operator_lists_the_children_of_a_session(stack: Stack, talk: Talk) -> None:
    children = (await get(talk, "/v1/sessions", parent=talk.session_id))["sessions"]

    lines = perdure(stack, "sessions", "--parent", talk.session_id)

    assert [line.split()[0] for line in lines] == [each["sessionId"] for each in children]


async def test_an_operator_reads_the_events_of_a_family_in_order(stack: Stack, talk: Talk) -> None:
    shown = await tree(talk, talk.session_id)
    ids = {shown["sessionId"]: "boss"}
    for child in shown["children"]:
        ids |= {each["sessionId"]: each["agent"] for each in (child, *child["children"])}

    events = [json.loads(line) for line in perdure(stack, "tail", talk.session_id, "--tree", "--no-follow")]

    times = [event["at"] for event in events]
    assert times == sorted(times)
    assert {(event["sessionId"], event["agent"]) for event in events} == set(ids.items())
    for session_id in ids:
        own = [event["index"] for event in events if event["sessionId"] == session_id]
        assert own == list(range(len(own)))
    assert sum(event["type"] == "session.completed" for event in events) == 3


async def test_an_operator_follows_children_from_their_start_to_their_end(stack: Stack) -> None:
    async with stack.talk(headers={"x-api-key": "ada"}) as talk:
        # It asks the clerk when it is followed already.
        later = call("clerk", message="drip 20 words delay 20")
        await talk.create(
            f"call researcher {json.dumps({'message': 'drip 40 words delay 50'})} then {later}", mode="task"
        )
        tail = await asyncio.create_subprocess_exec(
            *command("tail", talk.session_id, "--tree"),
            env=stack.environment,
            stdout=asyncio.subprocess.PIPE,
        )
        assert tail.stdout is not None
        first = json.loads(await tail.stdout.readline())

    events = [json.loads(line) for line in (await asyncio.wait_for(tail.stdout.read(), 60)).splitlines()]

    assert await tail.wait() == 0
    assert first["agent"] == "boss"
    assert (events[-1]["type"], events[-1]["agent"]) == ("session.completed", "boss")
    ends = [event["agent"] for event in events if event["type"] == "session.completed"]
    assert ends == ["researcher", "clerk", "boss"]
    for agent in ("researcher", "clerk"):
        own = [event["index"] for event in events if event["agent"] == agent]
        assert own == list(range(len(own)))
