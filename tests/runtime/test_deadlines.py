"""Bounds of time through the whole product, whoever dies meanwhile."""

import asyncio
from datetime import UTC, datetime, timedelta

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until

AGENTS = "tests.runtime.bounded:hasty,tests.runtime.bounded:patient,tests.runtime.bounded:idle"


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "1"}
    return module_stack(provider=True, agents=AGENTS, environment=environment)


def talking_to(stack: Stack, agent: str) -> Talk:
    return Talk(f"{stack.url}/agents/{agent}")


def soon(seconds: float = 2) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


async def until_end(talk: Talk) -> list[Json]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in talk.events()]


def seconds_between(first: Json, last: Json) -> float:
    times = [datetime.fromisoformat(event["meta"]["at"]).timestamp() for event in (first, last)]
    return times[1] - times[0]


async def test_a_turn_whose_worker_was_killed_fails_at_its_deadline(stack: Stack) -> None:
    async def asked() -> int:
        async with httpx2.AsyncClient(verify=False) as http:
            return (await http.get(f"{stack.provider_url}/count")).json()["total"]

    async def has_asked() -> bool:
        return await asked() == before + 1

    before = await asked()
    async with talking_to(stack, "hasty") as talk:
        await talk.create("hang")
        await until(has_asked)
        stack.workers[-1].kill()
        stack.start_worker(wait=False)
        events = await talk.until_boundary()
        await talk.send("say hello")
        again = await talk.until_boundary()

    failed = [event for event in events if event["type"] == "turn.failed"]
    assert [event["data"]["code"] for event in failed] == ["TURN_DEADLINE_EXCEEDED"]
    # Each attempt alone would have waited for the provider much longer.
    began = next(event for event in events if event["type"] == "turn.started")
    assert 3 <= seconds_between(began, failed[0]) < 15
    assert text(again) == "hello"


async def test_a_parked_session_ends_at_its_deadline_although_no_worker_runs_then(stack: Stack) -> None:
    async with talking_to(stack, "patient") as talk:
        deadline = soon()
        await talk.create('call pay {"amount": 5}', deadline=deadline)
        await talk.until_boundary()
        await talk.send("say that waits")
        stack.workers[-1].kill()
        await asyncio.sleep((datetime.fromisoformat(deadline) - datetime.now(UTC)).total_seconds())
        stack.start_worker(wait=False)
        events = await until_end(talk)
        late = await talk.http.post(
            f"/eve/v1/session/{talk.session_id}", json={"continuationToken": talk.token, "message": "Hello?"}
        )
        shown = (await talk.http.get(f"{stack.url}/v1/sessions/{talk.session_id}")).json()

    ended = types(events)
    assert events[-1]["data"]["code"] == "SESSION_DEADLINE_EXCEEDED"
    assert ended.index("input.resolved") < ended.index("turn.cancelled") < ended.index("delivery.refused")
    assert ended[-2:] == ["delivery.refused", "session.failed"]
    assert late.status_code == 409
    assert shown["status"] == "failed"
    assert datetime.fromisoformat(shown["deadline"]) - datetime.fromisoformat(deadline) < timedelta(seconds=1)


async def test_a_running_turn_is_cancelled_at_the_deadline_of_its_session(stack: Stack) -> None:
    async with talking_to(stack, "patient") as talk:
        await talk.create("hang", deadline=soon(), mode="task")
        events = await until_end(talk)

    assert types(events).count("turn.cancelled") == 1
    assert events[-1]["type"] == "session.failed"


async def test_an_idle_session_ends_after_a_while_and_one_that_is_used_does_not(stack: Stack) -> None:
    async with talking_to(stack, "idle") as talk, talking_to(stack, "idle") as asked:
        assert await talk.say("say one") == "one"
        await asked.create('call pay {"amount": 5}')
        await asyncio.sleep(1)
        assert await talk.say("say two") == "two"
        events = await until_end(talk)
        withdrawn = await until_end(asked)

    assert events[-1]["data"]["code"] == withdrawn[-1]["data"]["code"] == "SESSION_IDLE"
    assert types(events).count("turn.completed") == 2
    last = [event for event in events if event["type"] == "session.waiting"][-1]
    assert seconds_between(last, events[-1]) >= 2
    assert "input.resolved" in types(withdrawn)


@pytest.mark.parametrize(
    "bounds",
    [
        {"deadline": "tomorrow"},
        {"deadline": 5},
        {"deadline": "2999-01-01T00:00:00"},
        {"deadline": "2020-01-01T00:00:00Z"},
        # No date could be shown that is later.
        {"deadline": "9999-12-31T23:59:59.999999Z"},
        {"deadline": "9999-12-31T20:00:00-08:00"},
        {"deadline": "2999-01-01T00:00:00Z"},
        {"idleSeconds": 0},
        {"idleSeconds": True},
        {"idleSeconds": "60"},
    ],
)
async def test_bounds_that_cannot_be_meant_are_refused(stack: Stack, bounds: Json) -> None:
    async with talking_to(stack, "patient") as talk:
        answer = await talk.http.post("/eve/v1/session", json={"message": "Hi", **bounds})

    assert answer.status_code == 400, answer.text


async def test_a_repeated_request_gets_its_receipt_after_the_deadline_too(stack: Stack) -> None:
    async with talking_to(stack, "patient") as talk:
        request = {"message": "say hello", "deadline": soon(1)}
        headers = {"idempotency-key": "bounded"}
        first = await talk.http.post("/eve/v1/session", json=request, headers=headers)
        talk.session_id = first.json()["sessionId"]
        await until_end(talk)
        again = await talk.http.post("/eve/v1/session", json=request, headers=headers)

    assert again.status_code == first.status_code
    assert again.json() == first.json()
