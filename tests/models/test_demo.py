import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.tools import ToolDefinition

from perdure.agents.agent import FINAL_OUTPUT
from perdure.models.base import Prompt, Reply, TextDelta
from perdure.models.demo import DemoModel

TEXT = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
TOOLS = [
    ToolDefinition(name="roll_dice"),
    ToolDefinition(name="remember_note", parameters_json_schema=TEXT),
    ToolDefinition(name="current_time"),
]


async def reply(*messages: ModelMessage | str, tools: Sequence[ToolDefinition] = TOOLS) -> Reply:
    history: Sequence[ModelMessage] = [
        ModelRequest.user_text_prompt(message) if isinstance(message, str) else message for message in messages
    ]
    items = [item async for item in DemoModel().stream(Prompt(history, tools))]
    assert isinstance(items[-1], Reply)
    text = "".join(item.text for item in items if isinstance(item, TextDelta))
    assert text == (items[-1].response.text or "")
    return items[-1]


async def test_it_echoes() -> None:
    assert (await reply("Hello")).response.text == "You said: Hello"


@pytest.mark.parametrize("message", ["help", "Help!", "please help me"])
async def test_it_says_what_it_can_do(message: str) -> None:
    said = (await reply(message)).response.text or ""

    assert "`roll_dice`, `remember_note`, `current_time`" in said


async def test_a_longer_message_about_help_is_repeated() -> None:
    message = "write to the people who always help everybody around"

    assert (await reply(message)).response.text == f"You said: {message}"


async def test_a_story_is_long_enough_to_be_interrupted() -> None:
    assert len(((await reply("tell me a story")).response.text or "").split()) > 120


async def test_it_is_the_same_every_time() -> None:
    first, second = await reply("roll the dice"), await reply("roll the dice")

    assert first.response.parts == second.response.parts


async def test_one_message_can_call_two_tools_at_once() -> None:
    calls = (await reply("Roll the dice and tell me the time")).response.tool_calls

    assert [call.tool_name for call in calls] == ["roll_dice", "current_time"]


async def test_exact_arguments_are_no_words_for_other_tools() -> None:
    (call,) = (await reply('use remember_note {"note": "dice at this time"}')).response.tool_calls

    assert call.tool_name == "remember_note"


async def test_a_request_says_what_it_is_to_do() -> None:
    said = json.dumps({"drink": "tea", "demo": 'use remember_note {"note": "tea"}'})

    (call,) = (await reply(said)).response.tool_calls

    assert (call.tool_name, call.args) == ("remember_note", {"note": "tea"})


@pytest.mark.parametrize("said", ['{"drink": "tea"}', "{no JSON", '{"a":' * 5_000, '{"demo": 1}', '{"demo": ""}'])
async def test_any_other_object_is_a_message_like_others(said: str) -> None:
    assert (await reply(said)).response.text == f"You said: {said}"


async def test_then_makes_a_second_round_and_the_end_reports() -> None:
    said = ModelRequest.user_text_prompt("remember that tea is hot, then tell me the time")
    first = await reply(said)
    noted = ModelRequest([ToolReturnPart("remember_note", "Noted.", first.response.tool_calls[0].tool_call_id)])
    second = await reply(said, first.response, noted)
    returned = ModelRequest([ToolReturnPart("current_time", "noon", second.response.tool_calls[0].tool_call_id)])

    last = await reply(said, first.response, noted, second.response, returned)

    assert first.response.tool_calls[0].args == {"note": "tea is hot"}
    assert second.response.tool_calls[0].tool_name == "current_time"
    assert last.response.text == "remember_note: Noted.\ncurrent_time: noon"


async def test_a_tool_can_be_named_with_its_arguments() -> None:
    calls = (await reply('use remember_note {"note": "x"}')).response.tool_calls

    assert [(call.tool_name, call.args) for call in calls] == [("remember_note", {"note": "x"})]


def handing_over(schema: dict[str, Any]) -> list[ToolDefinition]:
    return [*TOOLS, ToolDefinition(name=FINAL_OUTPUT, parameters_json_schema=schema)]


async def test_a_result_that_is_asked_for_is_handed_over() -> None:
    last = await reply("my final word", tools=handing_over(TEXT))

    assert [(call.tool_name, call.args) for call in last.response.tool_calls] == [
        (FINAL_OUTPUT, {"note": "my final word"})
    ]


async def test_tools_are_used_before_the_result_is_handed_over() -> None:
    said = ModelRequest.user_text_prompt("tell me the time")
    first = await reply(said, tools=handing_over(TEXT))
    returned = ModelRequest([ToolReturnPart("current_time", "noon", first.response.tool_calls[0].tool_call_id)])

    last = await reply(said, first.response, returned, tools=handing_over(TEXT))

    assert [call.tool_name for call in first.response.tool_calls] == ["current_time"]
    assert [call.tool_name for call in last.response.tool_calls] == [FINAL_OUTPUT]


async def test_a_result_that_cannot_be_made_up_is_answered_as_text() -> None:
    impossible: dict[str, Any] = {"type": "object", "properties": {"value": False}, "required": ["value"]}

    last = await reply("hello", tools=handing_over(impossible))

    assert last.response.text == "You said: hello"
