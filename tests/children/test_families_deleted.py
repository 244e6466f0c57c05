"""Deleting members of a family of the real product."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

import pytest

from perdure.dev.supervisor import command
from tests.runtime.test_deletion import delete, listed, quick, rows
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until

AGENTS = "tests.children.agents:agents"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    with quick(tmp_path_factory.mktemp("stack"), agents=AGENTS) as stack:
        yield stack


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk


def call(name: str, **arguments: Any) -> str:
    return f"call {name} {json.dumps(arguments)}"


#: A child that works for half a minute.
BUSY = call("clerk", message="drip 600 words delay 50")


async def child_of(talk: Talk, session_id: str) -> str:
    """The id of the session's newest child, once it works."""
    found: list[str] = []

    async def works() -> bool:
        listed = (await talk.http.get("/v1/sessions", params={"parent": session_id})).json()["sessions"]
        found[:] = [each["sessionId"] for each in listed if each["status"] == "running"]
        return bool(found)

    await until(works, "the child")
    return found[0]


async def assert_gone(stack: Stack, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        assert rows(stack, session_id) == {}
        assert await listed(stack, session_id) == []


async def deleted(talk: Talk, session_id: str) -> Json:
    before, talk.session_id = talk.session_id, session_id
    try:
        return await delete(talk)
    finally:
        talk.session_id = before


async def test_nothing_is_left_of_a_family(stack: Stack, talk: Talk) -> None:
    await talk.create(call("researcher", message=BUSY))
    child = await child_of(talk, talk.session_id)
    grandchild = await child_of(talk, child)

    receipt = await delete(talk)

    assert receipt["status"] == "deleted"
    # Each has a driver and a turn.
    assert (receipt["deleted"]["sessions"], receipt["deleted"]["executions"]) == (3, 6)
    await assert_gone(stack, [talk.session_id, child, grandchild])
    for each in (child, grandchild):
        assert (await deleted(talk, each))["status"] == "deleted"


async def test_a_family_that_has_ended_is_deleted_as_a_whole(stack: Stack, talk: Talk) -> None:
    await talk.create(call("researcher", message=call("clerk", message="say Found it")))
    assert text(await talk.until_boundary()) == "Results: Results: Found it"

    receipt = await delete(talk)

    assert receipt["deleted"]["sessions"] == 3
    assert await listed(stack, talk.session_id) == []


async def test_a_turn_that_waits_for_a_deleted_child_goes_on_with_its_failure(stack: Stack, talk: Talk) -> None:
    await talk.create(call("researcher", message=BUSY))
    child = await child_of(talk, talk.session_id)
    grandchild = await child_of(talk, child)

    receipt = await deleted(talk, child)
    events = await talk.until_boundary()

    assert receipt["deleted"]["sessions"] == 2
    await assert_gone(stack, [child, grandchild])
    (result,) = [event["data"]["result"] for event in events if event["type"] == "action.result"]
    assert (result["isError"], result["output"]) == (True, "The session that did this task was deleted.")
    assert "subagent.completed" not in types(events)
    assert text(events).startswith("Results: ")
    assert await talk.say("say still here") == "still here"


async def test_an_operator_deletes_all_families_of_a_principal(stack: Stack, talk: Talk) -> None:
    await talk.create(call("researcher", message=BUSY))
    child = await child_of(talk, talk.session_id)
    grandchild = await child_of(talk, child)
    async with stack.talk() as other:
        await other.create(BUSY)
        ids = [talk.session_id, child, grandchild, other.session_id, await child_of(other, other.session_id)]

    done = await asyncio.to_thread(
        subprocess.run,
        command("sessions", "delete", "--principal", "local-dev:local-dev"),
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert re.search(r" 3 sessions", lines[talk.session_id])
    assert re.search(r" 2 sessions", lines[other.session_id])
    await assert_gone(stack, ids)
