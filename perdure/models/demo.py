"""The built-in model: needs no key, and is deterministic.

It repeats the message, and calls the agent's tools when the message names them: "roll the dice and tell me the time"
makes two calls at once, "roll the dice then tell me the time" makes them in two rounds, and `use some_tool {"a": 1}`
gives exact arguments. "help" lists the tools, and "tell me a story" streams for some seconds, to be interrupted.
When a result must fit an output schema, it makes a small one from the message. Of a message that is a JSON object with
a text `demo` (the request of an execution) it reads that text.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
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
#: The most values generated for one schema, because it may refer to itself.
_MOST_VALUES = 200
#: With more words, a message with "help" in it asks for something else.
_FEW_WORDS = 4
#: Words for a tool that are not in its name.
_TOOL_WORDS = {"roll": "dice", "remember": "note", "clock": "time"}


class DemoModel:
    """A deterministic model without a provider."""

    def __init__(self, *, delay: float = 0.0) -> None:
        self._delay = delay

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        said, returns, rounds = _last_message(prompt.messages)
        message = _script(said)
        if prompt.settings.get("tool_choice") == "none":
            prompt = replace(prompt, tools=())
        wanted = _THEN.split(message)
        calls = list(_calls(wanted[rounds], prompt)) if rounds < len(wanted) else []
        calls = calls or list(_result_call(message, prompt))
        text = "" if calls else _answer(message, returns, prompt.tools)
        for call in calls:
            yield ToolInputDelta(call.tool_call_id, call.tool_name, json.dumps(call.args))
        for piece in _PIECES.findall(text):
            yield TextDelta(piece)
            if self._delay:
                # A story lasts for ten seconds.
                await asyncio.sleep(self._delay * (4 if text is _STORY else 1))
        response = ModelResponse(
            parts=calls or [TextPart(text)],
            usage=RequestUsage(input_tokens=len(message.split()), output_tokens=len(text.split()) + 8 * len(calls)),
            model_name="demo",
            finish_reason="tool_call" if calls else "stop",
        )
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))


def _script(said: str) -> str:
    """What it is to do: the message itself, or what a request says for it."""
    if not said.startswith("{"):
        return said
    try:
        request = json.loads(said)
    except (ValueError, RecursionError):
        return said
    script = request.get("demo")
    return script if isinstance(script, str) and script else said


def _last_message(messages: Sequence[ModelMessage]) -> tuple[str, list[ToolReturnPart], int]:
    """The last message, the tool results since, and the number of rounds of calls since."""
    returns: list[ToolReturnPart] = []
    rounds = 0
    for message in reversed(messages):
        if isinstance(message, ModelRequest):
            prompts = [part.content for part in message.parts if isinstance(part, UserPromptPart)]
            if prompts:
                pieces = [prompts[-1]] if isinstance(prompts[-1], str) else prompts[-1]
                return " ".join(piece for piece in pieces if isinstance(piece, str)), returns, rounds
            returns[:0] = [part for part in message.parts if isinstance(part, ToolReturnPart)]
        elif message.tool_calls:
            rounds += 1
    return "", returns, rounds


def _calls(message: str, prompt: Prompt) -> Iterator[ToolCallPart]:
    exact = {match["tool"]: match["args"] for match in _EXACT.finditer(message)}
    # The arguments that it gives are no words for other tools.
    words = set(_WORD.findall(_EXACT.sub(" ", message).lower()))
    words |= {_TOOL_WORDS[word] for word in words if word in _TOOL_WORDS}
    for number, tool in enumerate(prompt.tools):
        named = words & set(_WORD.findall(tool.name.lower())) and tool.name != FINAL_OUTPUT
        if tool.name in exact or named:
            arguments = _arguments(tool, message, exact.get(tool.name))
            yield ToolCallPart(tool.name, arguments, tool_call_id=f"demo_{len(prompt.messages)}_{number}")


def _result_call(message: str, prompt: Prompt) -> Iterator[ToolCallPart]:
    """A call of `final_output`, when it is offered and a fitting result can be generated."""
    for tool in prompt.tools:
        if tool.name == FINAL_OUTPUT:
            with suppress(Unfit):
                result = made_up(tool.parameters_json_schema, message)
                yield ToolCallPart(FINAL_OUTPUT, result, tool_call_id=f"demo_{len(prompt.messages)}_result")


def _arguments(tool: ToolDefinition, message: str, exact: str | None) -> dict[str, Any]:
    """The given arguments, or a generated value for each required one."""
    if exact:
        try:
            return dict(json.loads(exact))
        except ValueError:
            return {}
    schema = tool.parameters_json_schema
    properties = schema.get("properties", {})
    plain = _NOTE.sub("", message)
    return {
        name: _value(properties.get(name, {}), plain, schema, iter(range(_MOST_VALUES)))
        for name in schema.get("required", [])
    }


class Unfit(Exception):
    """No fitting value was found."""


def made_up(schema: dict[str, Any], message: str) -> Any:
    """A small value that fits the schema, with the message as text where possible; `Unfit` when none is found."""
    if found := output_schema.problem(schema):
        raise Unfit(found)
    try:
        value = _value(schema, message, schema, iter(range(_MOST_VALUES)))
    except (TypeError, AttributeError, LookupError) as error:
        # An unusual schema that a real provider may accept; the demo does not.
        raise Unfit(str(error)) from error
    if not output_schema.validator(schema).is_valid(value):
        raise Unfit("the generated value does not fit")
    return value


def _value(schema: dict[str, Any], message: str, root: dict[str, Any], left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise Unfit("the schema is too large or recursive")
    if "$ref" in schema:
        found = root
        for step in filter(None, schema["$ref"].removeprefix("#").split("/")):
            found = found[step]
        return _value(found, message, root, left)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        named = [each for each in schema["enum"] if isinstance(each, str) and each and each.lower() in message.lower()]
        return [*named, *schema["enum"]][0]
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return _value(alternatives[0], message, root, left)
    types = schema.get("type", "object" if "properties" in schema else "string")
    match types if isinstance(types, str) else next((each for each in types if each != "null"), "null"):
        case "integer" | "number":
            number = re.search(r"\d+", message)
            value = int(number[0]) if number else 1
            value = max(value, schema.get("minimum", value))
            return min(value, schema.get("maximum", value))
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            count = min(schema.get("minItems", 0), _MOST_VALUES)
            return [_value(schema.get("items", {}), message, root, left) for _ in range(count)]
        case "object":
            properties: dict[str, Any] = schema.get("properties", {})
            # Without required properties, the first text property is filled.
            wanted = (
                schema.get("required") or [name for name in properties if properties[name].get("type") == "string"][:1]
            )
            return {name: _value(properties.get(name, {}), message, root, left) for name in wanted}
        case _:
            return message[: schema.get("maxLength", len(message))]


_STORY = """\
Once upon a time there was a process that wrote a long letter.
Each night somebody came and pulled its plug, and each morning it began again at the first word.
Then it learned to put every finished sentence into a drawer before it thought of the next one.
When the plug was pulled again, another process opened the drawer, read what was there, and went on.
The reader of the letter noticed a pause, as if somebody had looked out of the window, and nothing else.
In time there were many drawers and many processes, and the plug was pulled whenever somebody wanted a newer one.
Nobody wrote the same sentence twice, and nobody paid for a stamp twice.
And if no one has burned the drawer, they are still writing."""


def _answer(message: str, returns: Sequence[ToolReturnPart], tools: Sequence[ToolDefinition]) -> str:
    if returns:
        return "\n".join(f"{each.tool_name}: {each.model_response_str()}" for each in returns)
    if not message:
        return "Hello! Say something, and I will repeat it."
    words = set(_WORD.findall(message.lower()))
    if "story" in words:
        return _STORY
    if "help" in words and len(words) <= _FEW_WORDS:
        named = ", ".join(f"`{each.name}`" for each in tools) or "none"
        return (
            "I am the built-in demo model: I need no key, and I repeat what you say. "
            f"Name one of my tools, and I call it: {named}. "
            "Say “tell me a story”, and stop the worker while I do. PERDURE_MODEL names a real model."
        )
    return f"You said: {message}"
