"""Content of model calls and tool calls, for destinations that an operator has chosen for it. It is bounded in size."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_core import to_json

from perdure.protocol.wire import JsonObject

from . import names
from .spans import Spanned, chosen

log = logging.getLogger("perdure.telemetry")

#: How many messages a prompt had before those that are shown.
_LEFT_OUT = "perdure.content.left_out"
_CUT = "… (cut)"
#: Bytes of a text below which nothing is left to cut.
_LEAST = 16


def show_inference(span: Spanned, messages: Sequence[ModelMessage], response: ModelResponse) -> None:
    """The newest messages of a prompt that fit, its instructions, and the reply."""
    _show(span, names.INFERENCE_DETAILS, lambda most: _of_inference(span, messages, response, most))


def show_call(span: Spanned, arguments: JsonObject, result: Any) -> None:
    def content(most: int) -> Mapping[str, str]:
        return {names.ARGUMENTS: _short(_json(arguments), most), names.RESULT: _short(_json(result), most)}

    _show(span, names.TOOL_DETAILS, content)


def _show(span: Spanned, event: str, content: Callable[[int], Mapping[str, str]]) -> None:
    try:
        span.show(event, content(chosen().choices.content_bytes))
    except Exception as error:
        # The reply is paid for and the effect has happened: they must not be lost because they cannot be shown.
        log.warning("the content of %s could not be exported: %s", event, type(error).__name__)


def _of_inference(
    span: Spanned, messages: Sequence[ModelMessage], response: ModelResponse, most: int
) -> Mapping[str, str]:
    shown, left_out = _newest(messages, most)
    content = {names.INPUT_MESSAGES: shown, names.OUTPUT_MESSAGES: _list([_shortened(_message(response), most)])}
    last = messages[-1] if messages else None
    if isinstance(last, ModelRequest) and last.instructions:
        content[names.INSTRUCTIONS] = _list([_json(_text(_short(last.instructions, most // 2)))])
    if left_out:
        span.mark({_LEFT_OUT: left_out})
    return content


def _newest(messages: Sequence[ModelMessage], most: int) -> tuple[str, int]:
    """The newest messages of which the JSON has at most so many bytes, and how many older ones are left out."""
    taken: list[str] = []
    room = most - 2
    for message in reversed(messages):
        text = _shortened(_message(message), most)
        room -= len(text.encode()) + 1
        if room < 0:
            break
        taken.append(text)
    return _list(taken[::-1]), len(messages) - len(taken)


def _list(items: Sequence[str]) -> str:
    return f"[{','.join(items)}]"


def _shortened(message: JsonObject, most: int) -> str:
    """The message as JSON. One that is too long has the beginnings of its texts only."""
    text = _json(message)
    parts: list[JsonObject] = message["parts"]
    if len(text.encode()) + 2 <= most:
        return text
    parts = parts[: max(1, most // 128)]
    share = most // len(parts)
    while True:
        short = [{name: _short(_plain(value), share) for name, value in part.items()} for part in parts]
        text = _json({**message, "parts": short})
        # JSON writes some characters as six bytes.
        if len(text.encode()) + 2 <= most or share < _LEAST:
            return text
        share //= 2


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _short(text: str, most: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most:
        return text
    return encoded[: max(0, most - len(_CUT.encode()))].decode(errors="ignore") + _CUT


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="strings", bytes_mode="base64", serialize_unknown=True).decode()


def _message(message: ModelMessage) -> JsonObject:
    """A message as the conventions write it."""
    if isinstance(message, ModelResponse):
        return {"role": "assistant", "parts": [_said(part) for part in message.parts]}
    parts = [each for part in message.parts for each in _asked(part)]
    is_result = all(part["type"] == "tool_call_response" for part in parts)
    return {"role": "tool" if parts and is_result else "user", "parts": parts}


def _said(part: ModelResponsePart) -> JsonObject:
    match part:
        case TextPart(content=text):
            return _text(text)
        case ThinkingPart(content=text):
            return {"type": "reasoning", "content": text}
        case ToolCallPart():
            return {"type": "tool_call", "id": part.tool_call_id, "name": part.tool_name, "arguments": part.args}
        case _:
            return {"type": part.part_kind}


def _asked(part: ModelRequestPart) -> Iterator[JsonObject]:
    match part:
        case UserPromptPart(content=str(text)) | SystemPromptPart(content=text):
            yield _text(text)
        case UserPromptPart(content=items):
            # Of files only that they are there.
            yield from (_text(item) if isinstance(item, str) else {"type": "file"} for item in items)
        case ToolReturnPart():
            yield {"type": "tool_call_response", "id": part.tool_call_id, "response": part.content}
        case _:
            yield {"type": part.part_kind}


def _text(text: str) -> JsonObject:
    return {"type": "text", "content": text}
