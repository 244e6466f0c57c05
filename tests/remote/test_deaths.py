"""Processes of both servers die while one works for the other: the task runs once, and its result counts once."""

import asyncio
import json
import sys
from pathlib import Path

import httpx2
import pytest

from tests.remote.test_two_servers import KEY, call, one, sessions_of, two
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types

TASK = "drip 30 words delay 100"


async def asked(stack: Stack) -> list[str]:
    """What the scripted provider of this server was asked."""
    async with httpx2.AsyncClient(base_url=stack.provider_url) as http:
        return [each["said"] for each in (await http.get("/requests")).json()["requests"]]


def has_unread_request(port: int) -> bool:
    """Whether bytes wait in a connection to this port of this machine."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    waiting = {int(line[1].rpartition(":")[2], 16) for line in lines if int(line[4].rpartition(":")[2], 16) > 0}
    # Of a connection that is not accepted yet, the bytes are counted as those of the listener are: as connections.
    return port in waiting


def is_of_many(callbacks: bool, part: str) -> bool:
    return not callbacks and part != "worker"


of_many = pytest.mark.slow_where.with_args(is_of_many)


@of_many
@pytest.mark.parametrize("callbacks", [True, False], ids=["callback", "poll"])
@pytest.mark.parametrize("part", ["the caller's worker", "the caller's API", "all of the caller"])
async def test_a_death_of_the_caller_loses_and_repeats_nothing(
    make_stack: StackFactory, part: str, callbacks: bool
) -> None:
    caller, callee = two(make_stack, callbacks=callbacks)
    port = caller.url.rpartition(":")[2]
    async with caller.talk() as talk:
        await talk.create(call("away", message=TASK))
        await talk.until("subagent.called")
        if part != "the caller's API":
            caller.workers[0].kill()
        if part != "the caller's worker":
            caller.apis[0].kill()
            caller.start_api({"PERDURE_PORT": port})
        if part != "the caller's API":
            caller.start_worker()
        events = await talk.until_boundary(within=120)

    assert text(events).startswith("Results: w0 w1")
    assert types(events).count("action.result") == types(events).count("subagent.called") == 1
    assert len(await sessions_of(callee)) == 1
    assert (await asked(callee)).count(TASK) == 1
    assert len(await asked(caller)) == 2


@of_many
@pytest.mark.parametrize("callbacks", [True, False], ids=["callback", "poll"])
@pytest.mark.parametrize("part", ["worker", "api"])
async def test_a_death_of_the_one_that_is_called_loses_nothing(
    make_stack: StackFactory, part: str, callbacks: bool
) -> None:
    caller, callee = two(make_stack, callbacks=callbacks)
    port = callee.url.rpartition(":")[2]
    async with caller.talk() as talk:
        await talk.create(call("away", message=TASK))
        await talk.until("subagent.called")
        if part == "worker":
            callee.workers[0].kill()
            callee.start_worker()
        else:
            callee.apis[0].kill()
            callee.start_api({"PERDURE_PORT": port})
        events = await talk.until_boundary(within=120)

    assert text(events).startswith("Results: w0 w1")
    assert types(events).count("action.result") == 1
    assert len(await sessions_of(callee)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of connections")
async def test_a_worker_that_dies_while_it_starts_a_task_starts_it_once(make_stack: StackFactory) -> None:
    caller, callee = two(make_stack, callbacks=True)
    # Its API is frozen, so that the worker dies after the request was sent and before the answer came.
    callee.apis[0].stop()
    async with caller.talk() as talk:
        await talk.create(call("away", message="say Once"))
        store = await caller.store()
        key = ""
        async with asyncio.timeout(30):
            while True:
                events = await store.events(talk.session_id)
                action = next((each for each in events if each.type == "actions.requested" and each.data), None)
                if action is not None and action.data is not None:
                    key = f"subagent-call:away:{action.data['actions'][0]['callId']}"
                    known = await store.remote_call(talk.session_id, key)
                    if known is not None and known.state["tries"] > 0:
                        break
                await asyncio.sleep(0.05)
        await store.close()
        async with asyncio.timeout(30):
            while not has_unread_request(int(callee.url.rpartition(":")[2])):
                await asyncio.sleep(0.05)
        caller.workers[0].kill()
        callee.apis[0].cont()
        caller.start_worker()
        events = await talk.until_boundary(within=120)

    assert text(events) == "Results: Once"
    assert len(await sessions_of(callee)) == 1
    assert (await asked(callee)).count("say Once") == 1


async def test_two_servers_that_call_each_other_end_at_the_depth_of_one(make_stack: StackFactory) -> None:
    caller, callee = two(make_stack, callbacks=True, agents="tests.remote.agents:agents", keys_of_caller=True)
    # The one that is called calls back as a caller of its own.
    callee.workers[0].close()
    callee.start_worker({"REMOTE_URL": caller.url, "PERDURE_PUBLIC_URL": callee.url})
    message = "say The end"
    for _ in range(6):
        message = call("away", message=message)
    async with Talk(caller.url, headers={"x-api-key": KEY}) as talk:
        await talk.create(message)
        events = await talk.until_boundary(within=120)
        here = (await talk.http.get("/v1/sessions")).json()["sessions"]

    # One at the depths 0, 1, 2 and 3; the last one was refused, and said so to those above it.
    assert "agents may hand work on 3 times only" in text(events)
    assert len(await sessions_of(callee)) == 2
    assert len(here) == 2
    assert json.dumps(one(events, "subagent.called")).count(callee.url) == 1
