"""The demo model, asked for a result, through the whole product."""

from typing import Any

import pytest

from tests.support.stack import Stack
from tests.support.talk import Json

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"enum": ["s", "l"]}},
    "required": ["city"],
}


def results(events: list[Json]) -> list[Any]:
    return [event["data"]["result"] for event in events if event["type"] == "result.completed"]


@pytest.mark.parametrize(
    ("schema", "result"),
    [(CITY, {"city": "Oslo"}), ({"type": "string"}, "Oslo"), ({"type": "array", "items": {"type": "string"}}, [])],
    ids=["an object", "a string", "a list"],
)
async def test_it_hands_over_what_fits(stack: Stack, schema: Json, result: Any) -> None:
    async with stack.talk() as talk:
        await talk.create("Oslo", outputSchema=schema)
        first = await talk.until_boundary()
        later = await talk.say("hello")

    assert results(first) == [result]
    assert first[-1]["type"] == "session.waiting"
    assert later == "You said: hello"


async def test_a_task_ends_with_its_result(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("roll the dice", mode="task", outputSchema=CITY)
        events = [event async for event in talk.events()]

    assert results(events) == [{"city": "roll the dice"}]
    assert [event["data"]["result"]["toolName"] for event in events if event["type"] == "action.result"] == [
        "roll_dice"
    ]
    assert events[-1]["type"] == "session.completed"


async def test_a_schema_that_nothing_fits_fails_the_turn(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("Oslo", outputSchema={"type": "object", "required": ["a"], "additionalProperties": False})
        events = await talk.until_boundary()

    assert [event["type"] for event in events][-3:] == ["step.failed", "turn.failed", "session.waiting"]
