"""Rollbacks on the real product: what goes on after one, and what the model is told of it."""

from typing import Any

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text

NOTE = "The state of this session was set back to an earlier checkpoint"
SET_UP = 'call planning_setup_plan {"objective": "Ship it", "initial_steps": ["build", "send"]}'
DONE = 'call planning_update_step {"step_id": %d, "status": "done"}'


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def stack(request: pytest.FixtureRequest, make_stack: StackFactory) -> Stack:
    database = {"database_url": request.getfixturevalue("postgres_url")} if request.param == "postgres" else {}
    return make_stack(provider=True, agents="tests.runtime.planned:planner", **database)


async def asked(stack: Stack) -> list[Json]:
    """All requests that the provider has had."""
    async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as http:
        return (await http.get(f"{stack.provider_url}/requests")).json()["requests"]


async def read(talk: Talk, path: str = "") -> Any:
    return (await talk.http.get(f"/v1/sessions/{talk.session_id}{path}")).json()


async def statuses(talk: Talk) -> list[str]:
    return [each["status"] for each in (await read(talk, "/plan"))["plan"]["steps"]]


async def test_a_parked_session_that_is_rolled_back_takes_its_answer_and_tells_the_model(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say(f"{SET_UP} then {DONE % 1} then say half")
        await talk.send(f'{DONE % 2} then call pay {{"amount": 5}} then say paid')
        parked = await talk.until_boundary()
        [request] = next(event["data"]["requests"] for event in parked if event["type"] == "input.requested")
        second, first = (await read(talk, "/checkpoints"))["checkpoints"]
        before = await statuses(talk)

        path = f"/v1/sessions/{talk.session_id}/rollback"
        rolled = await talk.http.post(path, json={"checkpointId": first["checkpointId"]})
        repeated = await talk.http.post(path, json={"checkpointId": first["checkpointId"]})
        after = await statuses(talk)
        shown = await read(talk)
        known = len(await asked(stack))
        await talk.send(inputResponses=[{"requestId": request["requestId"], "optionId": "approve"}])
        # Where the turn has stopped reading, there is the event of the rollback.
        continued = await talk.until_boundary()
        of_answer = (await asked(stack))[known:]
        assert await talk.say("say on") == "on"
        of_next = (await asked(stack))[-1]

    assert (second["planStep"], first["planStep"]) == (2, 1)
    assert (before, after) == (["done", "done"], ["done", "pending"])
    assert (rolled.status_code, repeated.content) == (200, rolled.content)
    assert (shown["status"], shown["openInputs"]) == ("waiting", [request["requestId"]])
    assert [event["type"] for event in continued].count("session.rolled_back") == 1
    # The script is what was said last, which is the note now.
    assert text(continued) == "ok"
    [paid] = [event["data"] for event in continued if event["type"] == "action.result"]
    assert (paid["status"], paid["result"]["toolName"]) == ("completed", "pay")
    # The turn of the answer is told, and what it was told stays in the history, once.
    assert str(of_answer[0]["texts"]).count(NOTE) == 1
    assert str(of_next["texts"]).count(NOTE) == 1


async def test_a_fork_of_a_checkpoint_has_its_plan_and_goes_on_from_there(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say(f"{SET_UP} then {DONE % 1} then {DONE % 2} then say done")
        _, first = (await read(talk, "/checkpoints"))["checkpoints"]

        answer = await talk.http.post(
            f"/v1/sessions/{talk.session_id}/fork", json={"checkpoint": first["checkpointId"]}
        )
        forked = answer.json()
        async with stack.talk() as fork:
            fork.session_id, fork.token = forked["sessionId"], forked["continuationToken"]
            said = await fork.say(f"{DONE % 2} then say forked")
            made = await statuses(fork)

        assert answer.status_code == 201
        assert forked["parent"] == {"sessionId": talk.session_id, "turn": 0, "step": 1}
        assert (said, made) == ("forked", ["done", "done"])
        # It was open in the fork: to finish it there made a checkpoint of its own.
        [own] = (await read_of(fork, "/checkpoints"))["checkpoints"]
        assert own["planStep"] == 2


async def read_of(talk: Talk, path: str) -> Any:
    async with httpx2.AsyncClient(base_url=talk.http.base_url, timeout=PATIENCE, verify=False) as http:
        return (await http.get(f"/v1/sessions/{talk.session_id}{path}")).json()
