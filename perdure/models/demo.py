"""The built-in model: needs no key, and is the same every time.

It echoes, and calls the agent's tools when the message speaks of them: "roll the dice and tell me the time" makes
two calls at once, "roll the dice then tell me the time" makes them in two rounds, `use some_tool {"a": 1}` is exact.
When a result is asked of it that must fit a schema, it hands over the smallest one, with the message in it.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.agents import output_schema
from perdure.agents.agent import FINAL_OUTPUT

from .base import Delta, Prompt, Reply, TextDelta, ToolInputDelta, finish_reason, usage_of

_EXACT = re.compile(r"\buse\s+(?P<tool>[\w-]+)\s*(?P<args>\{.*\})?", re.IGNORECASE | re.DOTALL)
_THEN = re.compile(r"[,.;]?\s+(?:and\s+)?then\s+", re.IGNORECASE)
_WORD = re.compile(r"[a-z]{4,}")
_PIECES = re.compile(r"\S+\s*|\s+")
_NOTE = re.compile(r"^\W*(?:please\s+)?(?:remember|note)\s*(?:that|:)?\s*", re.IGNORECASE)
#: Values that are made up for one schema; it may refer to itself.
_MOST = 200
#: Words by which people mean a tool without naming it.
_MEANT = {"roll": "dice", "remember": "note", "clock": "time"}


class DemoModel:
    """A model that is not one."""

    def __init__(self, *, delay: float = 0.0) -> None:
        self._delay = delay

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        said, returns, rounds = _heard(prompt.messages)
        wanted = _THEN.split(said)
        calls = list(_calls(wanted[rounds], prompt)) if rounds < len(wanted) else []
        calls = calls or list(_handed_over(said, prompt))
        text = "" if calls else _answer(said, returns)
        async for delta in self._spoken(text, calls):
            yield delta
        response = ModelResponse(
            parts=calls or [TextPart(text)],
            usage=RequestUsage(input_tokens=len(said.split()), output_tokens=len(text.split()) + 8 * len(calls)),
            model_name="demo",
            finish_reason="tool_call" if calls else "stop",
        )
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))

    async def _spoken(self, text: str, calls: Sequence[ToolCallPart]) -> AsyncGenerator[Delta, None]:
        for call in calls:
            yield ToolInputDelta(call.tool_call_id, call.tool_name, json.dumps(call.args))
        for piece in _PIECES.findall(text):
            yield TextDelta(piece)
            if self._delay:
                await asyncio.sleep(self._delay)


def _heard(messages: Sequence[ModelMessage]) -> tuple[str, list[ToolReturnPart], int]:
    """What was said last, the results since, and how many rounds of calls that makes."""
    returns: list[ToolReturnPart] = []
    rounds = 0
    for message in reversed(messages):
        if isinstance(message, ModelRequest):
            said = [_words(part) for part in message.parts if isinstance(part, UserPromptPart)]
            if said:
                return said[-1], returns, rounds
            returns[:0] = [part for part in message.parts if isinstance(part, ToolReturnPart)]
        elif message.tool_calls:
            rounds += 1
    return "", returns, rounds


def _words(part: UserPromptPart) -> str:
    if isinstance(part.content, str):
        return part.content
    return " ".join(content for content in part.content if isinstance(content, str))


def _calls(said: str, prompt: Prompt) -> Iterator[ToolCallPart]:
    exact = {match["tool"]: match["args"] for match in _EXACT.finditer(said)}
    words = set(_WORD.findall(said.lower()))
    words |= {_MEANT[word] for word in words if word in _MEANT}
    for number, tool in enumerate(prompt.tools):
        meant = words & set(_WORD.findall(tool.name.lower())) and tool.name != FINAL_OUTPUT
        if tool.name in exact or meant:
            arguments = _arguments(tool, said, exact.get(tool.name))
            yield ToolCallPart(tool.name, arguments, tool_call_id=f"demo_{len(prompt.messages)}_{number}")


def _handed_over(said: str, prompt: Prompt) -> Iterator[ToolCallPart]:
    """The result, when one is asked for; nothing when none can be made up."""
    for tool in prompt.tools:
        if tool.name == FINAL_OUTPUT:
            with suppress(Unfit):
                result = made_up(tool.parameters_json_schema, said)
                yield ToolCallPart(FINAL_OUTPUT, result, tool_call_id=f"demo_{len(prompt.messages)}_result")


def _arguments(tool: ToolDefinition, said: str, exact: str | None) -> dict[str, Any]:
    """The arguments as given, or something for each required one."""
    if exact:
        try:
            return dict(json.loads(exact))
        except ValueError:
            return {}
    schema = tool.parameters_json_schema
    properties = schema.get("properties", {})
    plain = _NOTE.sub("", said)
    return {
        name: _value(properties.get(name, {}), plain, schema, iter(range(_MOST))) for name in schema.get("required", [])
    }


class Unfit(Exception):
    """No value was found that fits."""


def made_up(schema: dict[str, Any], said: str) -> Any:
    """A small value that fits the schema, with what was said where a text may stand; `Unfit` when none is found."""
    if found := output_schema.problem(schema):
        raise Unfit(found)
    try:
        value = _value(schema, said, schema, iter(range(_MOST)))
    except (TypeError, AttributeError, LookupError) as error:
        # An odd one that a provider would make something of: the demo does not.
        raise Unfit(str(error)) from error
    if not output_schema.validator(schema).is_valid(value):
        raise Unfit("what was made up does not fit")
    return value


def _value(schema: dict[str, Any], said: str, root: dict[str, Any], left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise Unfit("the schema has no end")
    if "$ref" in schema:
        return _value(_referred(schema["$ref"], root), said, root, left)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        named = [each for each in schema["enum"] if isinstance(each, str) and each and each.lower() in said.lower()]
        return [*named, *schema["enum"]][0]
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return _value(alternatives[0], said, root, left)
    types = schema.get("type", "object" if "properties" in schema else "string")
    match types if isinstance(types, str) else next((each for each in types if each != "null"), "null"):
        case "integer" | "number":
            number = re.search(r"\d+", said)
            least, most = schema.get("minimum"), schema.get("maximum")
            value = int(number[0]) if number else 1
            value = value if least is None else max(value, least)
            return value if most is None else min(value, most)
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            count = min(schema.get("minItems", 0), _MOST)
            return [_value(schema.get("items", {}), said, root, left) for _ in range(count)]
        case "object":
            properties: dict[str, Any] = schema.get("properties", {})
            # Where nothing has to be said, something can be.
            wanted = (
                schema.get("required") or [name for name in properties if properties[name].get("type") == "string"][:1]
            )
            return {name: _value(properties.get(name, {}), said, root, left) for name in wanted}
        case _:
            return said[: schema.get("maxLength", len(said))]


def _referred(reference: str, root: Any) -> dict[str, Any]:
    for step in filter(None, reference.removeprefix("#").split("/")):
        root = root[step]
    return root


def _answer(said: str, returns: Sequence[ToolReturnPart]) -> str:
    if returns:
        return "\n".join(f"{each.tool_name}: {each.model_response_str()}" for each in returns)
    if not said:
        return "Hello! Say something, and I will repeat it."
    return f"You said: {said}"
