"""Two servers: an agent of the one hands work to an agent of the other."""

import hashlib
import json
from typing import Any

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text, types

KEY = "a key of the tests"


def call(name: str, **arguments: Any) -> str:
    return f"call {name} {json.dumps(arguments)}"


def two(
    make: StackFactory,
    *,
    callbacks: bool,
    agents: str = "perdure.agents.demo:agent",
    keys_of_caller: bool = False,
) -> tuple[Stack, Stack]:
    """The server that calls, and the one that is called, which wants a key."""
    keys = {"PERDURE_API_KEYS": f"caller={hashlib.sha256(KEY.encode()).hexdigest()}", "PERDURE_LOCAL_CALLBACKS": "true"}
    callee = make(provider=True, environment=keys | {"PERDURE_MODEL": "openai-chat:scripted"}, agents=agents)
    caller = make(provider=True, apis=0, workers=0, agents="tests.remote.agents:agents")
    caller.environment |= keys if keys_of_caller else {}
    caller.environment["REMOTE_URL"] = callee.url
    caller.start_api()
    if callbacks:
        caller.environment["PERDURE_PUBLIC_URL"] = caller.url
    caller.start_worker()
    return caller, callee


@pytest.fixture(scope="module", params=["callback", "poll"])
def pair(module_stack: StackFactory, request: pytest.FixtureRequest) -> tuple[Stack, Stack]:
    return two(module_stack, callbacks=request.param == "callback")


async def sessions_of(callee: Stack) -> list[dict[str, Any]]:
    async with httpx2.AsyncClient(base_url=callee.url, headers={"x-api-key": KEY}) as http:
        return (await http.get("/v1/sessions")).json()["sessions"]


def one(events: list[dict[str, Any]], type: str) -> dict[str, Any]:
    (found,) = [event["data"] for event in events if event["type"] == type]
    return found


async def test_the_result_of_a_remote_agent_comes_back_to_the_turn_that_asked(pair: tuple[Stack, Stack]) -> None:
    caller, callee = pair
    before = len(await sessions_of(callee))
    async with caller.talk() as talk:
        await talk.create(call("away", message="say Found it"))
        events = await talk.until_boundary()

    assert text(events) == "Results: Found it"
    called = one(events, "subagent.called")
    there = await sessions_of(callee)
    assert len(there) == before + 1
    assert called["childSessionId"] == there[0]["sessionId"]
    assert called["remote"] == {"url": callee.url}
    action = one(events, "actions.requested")["actions"][0]
    assert (action["kind"], action["remoteAgentName"]) == ("remote-agent-call", "away")
    assert one(events, "subagent.completed")["output"] == "Found it"
    result = one(events, "action.result")
    assert (result["status"], result["result"]["kind"]) == ("completed", "subagent-result")
    order = [each for each in types(events) if each.startswith(("subagent", "action.r", "step.c"))]
    assert order[:4] == ["step.completed", "subagent.called", "subagent.completed", "action.result"]


async def test_a_structured_result_stays_structured(pair: tuple[Stack, Stack]) -> None:
    caller, _ = pair
    schema = {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}
    async with caller.talk() as talk:
        task = 'call final_output {"sku": "tea"}'
        await talk.create(call("away", message=task, outputSchema=schema))
        events = await talk.until_boundary()

    assert one(events, "action.result")["result"]["output"] == {"sku": "tea"}


async def test_a_remote_failure_is_a_failed_result_with_the_code_of_the_contract(pair: tuple[Stack, Stack]) -> None:
    caller, _ = pair
    async with caller.talk() as talk:
        await talk.create(call("away", message="fail 400"))
        events = await talk.until_boundary()

    result = one(events, "action.result")
    assert (result["status"], result["error"]["code"]) == ("failed", "SESSION_FAILED")
    assert "subagent.completed" not in types(events)
    assert types(events)[-2:] == ["turn.completed", "session.waiting"]


async def test_local_and_remote_agents_and_tools_work_in_one_step(pair: tuple[Stack, Stack]) -> None:
    caller, _ = pair
    calls = " and ".join(
        [
            f"away {json.dumps({'message': 'say One'})}",
            f"near {json.dumps({'message': 'say Two'})}",
            'add {"a": 1, "b": 2}',
            f"away {json.dumps({'message': 'say Four'})}",
        ]
    )
    async with caller.talk() as talk:
        await talk.create(f"call {calls}")
        events = await talk.until_boundary()

    results = [each["data"]["result"]["output"] for each in events if each["type"] == "action.result"]
    assert sorted(map(str, results)) == ["3", "Four", "One", "Two"]


async def test_cancelling_the_turn_cancels_the_session_on_the_other_server(pair: tuple[Stack, Stack]) -> None:
    caller, callee = pair
    async with caller.talk() as talk:
        await talk.create(call("away", message="drip 500 words delay 100"))
        await talk.until("subagent.called")

        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        events = await talk.until_boundary()

    assert "turn.cancelled" in types(events)
    there = await sessions_of(callee)
    assert there[0]["status"] == "failed"
    result = one(events, "action.result")
    assert result["status"] == "failed"


async def test_no_secret_is_in_the_store_the_logs_or_temporal(pair: tuple[Stack, Stack]) -> None:
    caller, callee = pair
    async with caller.talk() as talk:
        await talk.create(call("away", message="say Found it"))
        await talk.until_boundary()
        client = await caller.client()
        history = (await client.get_workflow_handle(talk.session_id).fetch_history()).to_json()

    files = [path.read_bytes() for stack in pair for path in (stack.directory / "data").rglob("perdure.db*")]
    logs = [text.encode() for stack in pair for _, text in stack.logs()]
    for secret in (KEY.encode(), b"acme-secret-tenant"):
        assert not any(secret in each for each in (*files, *logs, history.encode()))
    # The token is at the other server until the callback is delivered, and nowhere else.
    caller_files = [path.read_bytes() for path in (caller.directory / "data").rglob("perdure.db*")]
    assert not any(b"cb_" in each for each in (*caller_files, *logs, history.encode()))
    assert callee.directory != caller.directory
