"""What callers are told of their deliveries and of the turns that read them."""

from typing import Any

from tests.support.talk import Talk

LONG = "drip 40 words delay 50"


async def show(talk: Talk, delivery_id: str, **headers: str) -> dict[str, Any]:
    answer = await talk.http.get(f"/v1/deliveries/{delivery_id}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def settled(talk: Talk, delivery_id: str) -> dict[str, Any]:
    return await show(talk, delivery_id, prefer="wait=30")


async def change(talk: Talk, delivery_id: str, **changes: Any) -> dict[str, Any]:
    url = f"/v1/deliveries/{delivery_id}"
    version = (await talk.http.get(url)).headers["etag"]
    answer = await talk.http.patch(url, json=changes, headers={"if-match": version})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def busy(talk: Talk) -> str:
    """Begin a turn that takes two seconds; the id of its delivery."""
    first = (await talk.create(LONG))["deliveryId"]
    await talk.until("message.appended")
    return first


def prompts(events: list[dict[str, Any]]) -> list[list[str]]:
    """The messages of each turn."""
    turns: list[list[str]] = []
    for event in events:
        if event["type"] == "turn.started":
            turns.append([])
        elif event["type"] == "message.received":
            turns[-1].append(event["data"]["message"])
    return turns


async def all_turns(talk: Talk, count: int) -> list[dict[str, Any]]:
    return [event for _ in range(count) for event in await talk.until_boundary()]


def of_type(events: list[dict[str, Any]], *types: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] in types]
