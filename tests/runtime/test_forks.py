"""Forks on the real product: what the model is asked, and what the two sessions do to each other."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.dev.supervisor import command
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runtime.served:chat")


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    async with stack.talk() as talk:
        yield talk


async def fork(talk: Talk, turn: int, step: int | None = None, *, key: str | None = None) -> Talk:
    headers = {} if key is None else {"idempotency-key": key}
    place = {"turn": turn} if step is None else {"turn": turn, "step": step}
    answer = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json=place, headers=headers)
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert body["parent"] == {"sessionId": talk.session_id, **place}
    forked = Talk(str(talk.http.base_url))
    forked.session_id, forked.token = body["sessionId"], body["continuationToken"]
    return forked


async def asked(stack: Stack) -> list[Json]:
    """All requests that the provider has had."""
    async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as http:
        return (await http.get(f"{stack.provider_url}/requests")).json()["requests"]


async def operate(stack: Stack, *words: str) -> "subprocess.CompletedProcess[str]":
    """What `perdure sessions` with these words says."""
    return await asyncio.to_thread(
        subprocess.run,
        command("sessions", *words),
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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
    stack = make_stack(provider=True, agents="tests.runtime.served:chat", database_url=postgres_url)
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


async def test_a_fork_after_a_step_continues_with_the_results_of_that_step(stack: Stack, talk: Talk) -> None:
    await talk.say("say before")
    await talk.say('call add {"a": 1, "b": 2} then call add {"a": 3, "b": 4} then say seven')
    async with await fork(talk, 1, 0) as forked:
        assert await forked.say("say other") == "other"
        of_fork = (await asked(stack))[-1]
        await forked.say("say more")
        async with await fork(forked, 1) as again, await fork(forked, 2) as later:
            assert await again.say("say other") == "other"
            of_again = (await asked(stack))[-1]
            await later.say("say last")
            of_later = (await asked(stack))[-1]
        shown = (await forked.http.get(f"/v1/sessions/{forked.session_id}")).json()
    await talk.say("say after")
    of_parent = (await asked(stack))[-1]

    def has(request: Json, *texts: str) -> list[bool]:
        return [any(each in said for said in request["texts"]) for each in texts]

    assert has(of_fork, "say before", "say other") == [True, True]
    # The system's; question and reply; question, call and result, once or twice; the new question. The parent has the
    # reply to the second result, too, and the later fork one more turn.
    assert [each["messages"] for each in (of_fork, of_parent, of_later)] == [7, 10, 9]
    assert of_again["digest"] == of_fork["digest"]
    assert has(of_later, "say more", "say last") == [False, True]
    assert shown["parent"] == {"sessionId": talk.session_id, "turn": 1, "step": 0}


async def test_a_turn_that_waits_is_forked_after_its_earlier_steps(stack: Stack, talk: Talk) -> None:
    await talk.say("say before")
    await talk.send('call add {"a": 1, "b": 2} then call pay {"amount": 5} then say paid')
    parked = await talk.until_boundary()

    refused = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 1})
    assert (refused.json()["reason"], refused.json()["nearest"]) == ("turn_parked", {"turn": 1, "step": 0})
    again = await talk.http.post(f"/v1/sessions/{talk.session_id}/fork", json={"turn": 1, "step": 1})
    assert (again.json()["reason"], again.json()["nearest"]) == ("turn_parked", {"turn": 1, "step": 0})

    async with await fork(talk, **refused.json()["nearest"]) as forked:
        assert await forked.say("say on") == "on"
        assert (await asked(stack))[-1]["messages"] == 7
        waiting = (await forked.http.get(f"/v1/sessions/{forked.session_id}")).json()
        assert waiting["status"] == "waiting"
    assert text(await approve(talk, parked)) == "paid"


async def test_a_fork_after_a_step_is_exported_and_imported(stack: Stack, talk: Talk, tmp_path: Path) -> None:
    await talk.say('call add {"a": 1, "b": 2} then call add {"a": 3, "b": 4} then say seven')

    async def run(*words: str) -> str:
        done = await operate(stack, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    refused = await operate(stack, "fork", talk.session_id, "--turn", "turn_0", "--step", "9")
    assert refused.stderr.strip().endswith("It can be forked with --turn 0 --step 2.")
    made = await run("fork", talk.session_id, "--turn", "turn_0", "--step", "0")
    fork_id, fork_token = (line.split()[-1] for line in made.splitlines())
    exported = tmp_path / "fork.jsonl"
    exported.write_text(await run("export", fork_id))
    imported_id, imported_token = (await run("import", str(exported), "--token")).split()
    digests: list[str] = []
    for session_id, token in ((fork_id, fork_token), (imported_id, imported_token)):
        async with stack.talk() as forked:
            forked.session_id, forked.token = session_id, token
            assert await forked.say("say on") == "on"
        digests.append((await asked(stack))[-1]["digest"])

    assert digests[0] == digests[1]


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
    key = f"fork of {talk.session_id}"
    async with await fork(talk, 0, key=key) as first, await fork(talk, 0, key=key) as second:
        assert (first.session_id, first.token) == (second.session_id, second.token)
        # The key of another request belongs to that request.
        other = await talk.http.post("/eve/v1/session", json={"message": "say no"}, headers={"idempotency-key": key})
        assert other.status_code == 409
        assert await second.say("say two") == "two"


async def test_an_operator_forks_a_session_of_anybody(stack: Stack, talk: Talk) -> None:
    await talk.say("say one")

    done = await operate(stack, "fork", talk.session_id, "--turn", "0")

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
