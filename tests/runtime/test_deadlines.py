"""Bounds of time through the whole product, whoever dies meanwhile."""

from datetime import datetime

import httpx2

from tests.support.plugin import StackFactory
from tests.support.talk import Json, text
from tests.support.waiting import until


def seconds_between(first: Json, last: Json) -> float:
    times = [datetime.fromisoformat(event["meta"]["at"]).timestamp() for event in (first, last)]
    return times[1] - times[0]


async def test_a_turn_whose_worker_was_killed_fails_at_its_deadline(make_stack: StackFactory) -> None:
    stack = make_stack(
        provider=True, agents="tests.runtime.bounded:hasty", environment={"PERDURE_HEARTBEAT_TIMEOUT": "1"}
    )

    async def asked() -> int:
        async with httpx2.AsyncClient() as http:
            return (await http.get(f"{stack.provider_url}/count")).json()["total"]

    async def has_asked() -> bool:
        return await asked() == 1

    async with stack.talk() as talk:
        await talk.create("hang")
        await until(has_asked)
        stack.workers[0].kill()
        stack.start_worker(wait=False)
        events = await talk.until_boundary()
        await talk.send("say hello")
        again = await talk.until_boundary()

    failed = [event for event in events if event["type"] == "turn.failed"]
    assert [event["data"]["code"] for event in failed] == ["TURN_DEADLINE_EXCEEDED"]
    # Of the first attempt, not of the last one: each of them would have waited for the provider much longer.
    began = next(event for event in events if event["type"] == "turn.started")
    assert 3 <= seconds_between(began, failed[0]) < 12
    assert await asked() <= 3
    assert text(again) == "hello"
