"""Forks on the real product: what the model is asked, and what the two sessions do to each other."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Generator
from typing import Any

import httpx2
import pytest

from perdure.dev.supervisor import command
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), provider=True, agents="tests.runtime.served:providers") as stack:
        yield stack


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk


async def fork(talk: Talk, turn: int, **headers: str) -> Talk:
    answer = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": turn}, headers=headers)
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert body["parent"] == {"sessionId": talk.session_id, "turn": turn}
    forked = Talk(str(talk.http.base_url))
    forked.session_id, forked.token = body["sessionId"], body["continuationToken"]
    return forked


async def asked(stack: Stack) -> list[Json]:
    """All requests that the provider has had."""
    async with httpx2.AsyncClient(timeout=PATIENCE) as http:
        return (await http.get(f"{stack.provider_url}/requests")).json()["requests"]


def emitted(events: list[Json], type: str) -> list[Any]:
    return [event["data"] for event in events if event["type"] == type]


async def approve(talk: Talk, parked: list[Json]) -> list[Json]:
    [request] = emitted(parked, "input.requested")[0]["requests"]
    await talk.send(inputResponses=[{"requestId": request["requestId"], "optionId": "approve"}])
    return await talk.until_boundary()


async def test_the_model_cannot_tell_a_fork_from_its_parent(stack: Stack, talk: Talk) -> None:
    await talk.say('call add {"a": 1, "b": 2} then say three')
    await talk.send('call pay {"amount": 5} then say paid')
    await approve(talk, await talk.until_boundary())
    async with await fork(talk, 2) as forked:
        await forked.say("say on")
        of_fork = (await asked(stack))[-1]
        await talk.say("say on")
        of_parent = (await asked(stack))[-1]
        shown = (await forked.http.get(f"/v1/sessions/{forked.session_id}")).json()

    assert of_fork["digest"] == of_parent["digest"]
    assert "say on" in of_fork["texts"]
    assert shown["parent"] == {"sessionId": talk.session_id, "turn": 2}
    assert shown["counts"]["turns"] == 4


@pytest.mark.postgres
async def test_the_model_cannot_tell_a_fork_from_its_parent_on_postgres(
    make_stack: StackFactory, postgres_url: str
) -> None:
    stack = make_stack(provider=True, agents="tests.runtime.served:providers", database_url=postgres_url)
    async with stack.talk() as talk:
        await talk.say('call add {"a": 1, "b": 2} then say three')
        await talk.say("say later")
        async with await fork(talk, 0) as forked, await fork(forked, 0) as again:
            assert await forked.say("say on") == "on"
            of_fork = (await asked(stack))[-1]
            assert await again.say("say on") == "on"

    assert of_fork["digest"] == (await asked(stack))[-1]["digest"]
    assert "say later" not in of_fork["texts"]


async def test_a_fork_at_an_earlier_turn_rewinds(stack: Stack, talk: Talk) -> None:
    await talk.say("say first")
    await talk.say("say second")
    async with await fork(talk, 0) as forked:
        await forked.send("say other")
        events = await forked.until_boundary()
        async with await fork(forked, 1) as again:
            assert await again.say("say again") == "again"
        requests = await asked(stack)
    await talk.say("say third")

    assert types(events) == ["session.forked", "session.started", *types(events)[2:]]
    assert [data["turnId"] for data in emitted(events, "turn.started")] == ["turn_1"]
    assert text(events) == "other"
    said = requests[-1]["texts"]
    assert [each in said for each in ("say first", "say other", "say second")] == [True, True, False]
    assert "say other" not in (await asked(stack))[-1]["texts"]


async def test_a_turn_that_waits_for_people_is_no_boundary(stack: Stack, talk: Talk) -> None:
    await talk.say("say before")
    await talk.send('call pay {"amount": 5} then say paid')
    parked = await talk.until_boundary()

    async def refusal(turn: int) -> Json:
        answer = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": turn})
        assert answer.status_code == 409, answer.text
        return answer.json()

    refused = await refusal(1)
    assert (refused["code"], refused["reason"], refused["nearest"]) == (
        "fork_boundary_not_offered",
        "turn_parked",
        {"turn": 0},
    )
    assert (await refusal(7))["reason"] == "turn_not_begun"

    # A fork before it waits for nothing, and the answer belongs to the parent.
    async with await fork(talk, 0) as forked:
        [request] = emitted(parked, "input.requested")[0]["requests"]
        late = await forked.http.post(
            f"/eve/v1/session/{forked.session_id}",
            json={
                "continuationToken": forked.token,
                "inputResponses": [{"requestId": request["requestId"], "optionId": "approve"}],
            },
        )
        assert late.json()["inputs"] == [{"requestId": request["requestId"], "status": "unknown"}]
        assert "paid 5" not in str(await forked.until_boundary())
        done = await approve(talk, parked)
        assert text(done) == "paid"
        assert (await refusal(1))["reason"] == "turn_parked"
        async with await fork(talk, 2) as later:
            assert await later.say("say on") == "on"


async def test_a_repeated_request_gets_the_first_fork(talk: Talk) -> None:
    await talk.say("say one")
    keyed = {"idempotency-key": f"fork of {talk.session_id}"}
    async with await fork(talk, 0, **keyed) as first, await fork(talk, 0, **keyed) as second:
        assert (first.session_id, first.token) == (second.session_id, second.token)
        # The key of another request belongs to that request.
        other = await talk.http.post("/eve/v1/session", json={"message": "say no"}, headers=keyed)
        assert other.status_code == 409
        assert await second.say("say two") == "two"


async def test_an_operator_forks_a_session_of_anybody(stack: Stack, talk: Talk) -> None:
    await talk.say("say one")

    done = await asyncio.to_thread(
        subprocess.run,
        command("sessions", "fork", talk.session_id, "--turn", "0"),
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    async with stack.talk() as forked:
        forked.session_id, forked.token = (line.split()[-1] for line in done.stdout.splitlines())
        assert await forked.say("say two") == "two"


async def test_a_fork_of_a_session_that_has_ended_continues(stack: Stack, talk: Talk) -> None:
    await talk.create("say done", mode="task")
    await talk.until_boundary()
    async with await fork(talk, 0) as forked:
        await forked.send("say again")
        events = await forked.until_boundary()

    assert text(events) == "again"
    assert types(events)[-1] == "session.completed"
    assert "say done" in (await asked(stack))[-1]["texts"]
