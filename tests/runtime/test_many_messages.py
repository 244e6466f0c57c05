"""Hundreds of messages to one session, whose driver continues as new again and again meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.told import of_type, prompts
from tests.support.plugin import StackFactory
from tests.support.talk import Json, Talk

#: More than wait at once: who comes too early is refused, and tries again.
_ROOM = {"PERDURE_MAX_INBOX": "500"}


async def post(talk: Talk, message: str, key: str) -> str:
    """Deliver a message as a careful client does: again until it is accepted, under one key."""
    body = {"continuationToken": talk.token, "message": message}
    while True:
        answer = await talk.http.post(f"/eve/v1/session/{talk.session_id}", json=body, headers={"idempotency-key": key})
        if answer.is_success:
            return answer.json()["deliveryId"]
        assert (answer.status_code, answer.json()["code"]) == (429, "inbox_full"), answer.text
        await asyncio.sleep(float(answer.headers["retry-after"]))


async def listed(talk: Talk) -> list[Json]:
    """All deliveries of the session, the oldest first."""
    found: list[Json] = []
    query: dict[str, Any] = {"limit": 100}
    while True:
        answer = await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries", params=query)
        assert answer.is_success, answer.text
        found += answer.json()["deliveries"]
        if (cursor := answer.json().get("nextCursor")) is None:
            return found[::-1]
        query["cursor"] = cursor


async def turns(talk: Talk, count: int, within: float) -> list[Json]:
    """The events until so many turns have ended."""
    events: list[Json] = []
    async with asyncio.timeout(within):
        async for event in talk.events():
            events.append(event)
            count -= event["type"] == "session.waiting"
            if count == 0:
                break
    return events


def settled_by(events: Sequence[Json]) -> Counter[str]:
    """How often the end of a turn, or a refusal, has settled each delivery."""
    ends = of_type(list(events), "turn.completed", "turn.failed", "turn.cancelled")
    refused = [event["data"]["deliveryId"] for event in of_type(list(events), "delivery.refused")]
    return Counter([each for end in ends for each in end["meta"]["deliveryIds"]] + refused)


@pytest.mark.parametrize(
    ("agent", "count"),
    [("inline", 150), *(pytest.param(each, 1000, marks=pytest.mark.slow) for each in ("child", "inline"))],
)
async def test_each_of_many_messages_is_heard_once_and_in_order(
    make_stack: StackFactory, agent: str, count: int
) -> None:
    stack = make_stack(provider=True, agents=f"tests.runtime.many:{agent}", environment=_ROOM)
    client = await stack.client()
    async with stack.talk() as talk:
        said = [f"say m{number}" for number in range(count)]
        ids = [(await talk.create(said[0]))["deliveryId"]]
        first_run = (await client.get_workflow_handle(talk.session_id).describe()).run_id
        ids += [await post(talk, message, message) for message in said[1:]]

        events = await turns(talk, count, within=count)
        deliveries = await listed(talk)
        last_run = (await client.get_workflow_handle(talk.session_id).describe()).run_id
        asked = (await talk.http.get(f"{stack.provider_url}/requests")).json()["requests"]

    assert prompts(events) == [[message] for message in said]
    assert settled_by(events) == Counter(ids)
    assert [each["deliveryId"] for each in deliveries] == ids
    assert [(each["outcome"], each["turnId"]) for each in deliveries] == [
        ("completed", f"turn_{number}") for number in range(count)
    ]
    assert [request["texts"][-1] for request in asked] == said
    assert last_run != first_run
