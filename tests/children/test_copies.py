"""Forks and exports of sessions that have handed work to others: the results are records of their own."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.dev.supervisor import command
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.children.agents:agents")


def call(name: str, **arguments: Any) -> str:
    return f"call {name} {json.dumps(arguments)}"


def perdure(stack: Stack, *words: str) -> str:
    done = subprocess.run(
        command(*words), env=stack.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def children(talk: Talk, session_id: str) -> list[Json]:
    return (await talk.http.get("/v1/sessions", params={"parent": session_id})).json()["sessions"]


async def test_a_session_with_children_can_be_imported_without_them(stack: Stack, tmp_path: Path) -> None:
    async with stack.talk() as talk:
        assert await talk.say(call("researcher", message="say Found it")) == "Results: Found it"
        file = tmp_path / "session.jsonl"
        file.write_text(perdure(stack, "sessions", "export", talk.session_id))
        await talk.http.delete(f"/v1/sessions/{talk.session_id}")

        session_id, token = perdure(stack, "sessions", "import", str(file), "--token").split()

        talk.session_id, talk.token, talk.cursor = session_id, token, 0
        assert await talk.say("say still here") == "still here"
        assert await talk.say(call("clerk", message="say again")) == "Results: again"
        assert [each["agent"] for each in await children(talk, session_id)] == ["clerk"]


async def test_a_fork_after_a_step_with_children_has_their_results_and_children_of_its_own(stack: Stack) -> None:
    async with stack.talk() as talk:
        asked = f"{call('researcher', message='say one')} then {call('clerk', message='say two')}"
        assert await talk.say(asked) == "Results: one | two"
        await talk.say("say later")

        answer = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 0, "step": 0})
        assert answer.status_code == 201, answer.text
        fork = answer.json()

        before = await children(talk, talk.session_id)
        talk.session_id, talk.token, talk.cursor = fork["sessionId"], fork["continuationToken"], 0
        assert await children(talk, talk.session_id) == []
        assert await talk.say(call("clerk", message="say three")) == "Results: three"
        (own,) = await children(talk, talk.session_id)
        assert own["sessionId"] not in {each["sessionId"] for each in before}
        assert own["parent"]["rootSessionId"] == talk.session_id


async def test_a_session_that_waits_for_its_children_is_not_forked_there(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say hello")
        await talk.send(call("clerk", message="drip 60 words delay 50"))

        async def works() -> bool:
            return any(each["status"] == "running" for each in await children(talk, talk.session_id))

        await until(works, "the child")
        waits = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 1})
        before = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 0})

        assert (waits.status_code, waits.json()["code"]) == (409, "fork_boundary_not_offered")
        assert before.status_code == 201
        events = await talk.until_boundary()
        assert types(events)[-1] == "session.waiting"
        assert text(events).startswith("Results: w0")


async def test_a_fork_of_a_child_is_a_session_without_a_parent_that_waits(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say(call("clerk", message=call("add", a=1, b=2)))
        (child,) = await children(talk, talk.session_id)

        answer = await talk.http.post(f"/v1/sessions/{child['sessionId']}/fork", json={"turn": 0, "step": 0})

        assert answer.status_code == 201, answer.text
        fork = answer.json()["sessionId"]
        tree = (await talk.http.get(f"/v1/sessions/{talk.session_id}/tree")).json()
        assert [each["sessionId"] for each in tree["children"]] == [child["sessionId"]]
        assert (await talk.http.get(f"/v1/sessions/{fork}")).json()["parent"]["sessionId"] == child["sessionId"]
