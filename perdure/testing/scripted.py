"""A model with the replies of a test."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from perdure.errors import ModelFailed
from perdure.models.base import Delta, Model, Prompt, Reply, TextDelta, finish_reason, usage_of
from perdure.protocol.wire import JsonObject


@dataclass(frozen=True)
class ScriptedCall:
    tool: str
    arguments: JsonObject
    call_id: str | None = None


def call(tool: str, /, **arguments: Any) -> ScriptedCall:
    """A tool call for a `ScriptedModel`."""
    return ScriptedCall(tool, arguments)


Line: TypeAlias = str | ScriptedCall | Sequence[str | ScriptedCall] | ModelResponse | Exception


class ScriptedModel:
    """Gives these replies in order: text, a tool call, several of both, or an exception to raise."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = list(lines)
        #: The prompts that it got, in order.
        self.prompts: list[Prompt] = []

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        number = len(self.prompts)
        self.prompts.append(prompt)
        if number >= len(self._lines):
            raise ModelFailed(f"The script has {len(self._lines)} replies, and the agent needs one more.")
        line = self._lines[number]
        if isinstance(line, Exception):
            raise line
        response = _response(line, number)
        for part in response.parts:
            if isinstance(part, TextPart) and part.content:
                yield TextDelta(part.content)
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))


def _response(line: str | ScriptedCall | Sequence[str | ScriptedCall] | ModelResponse, number: int) -> ModelResponse:
    if isinstance(line, ModelResponse):
        return line
    pieces = [line] if isinstance(line, str | ScriptedCall) else line
    parts = [
        TextPart(piece)
        if isinstance(piece, str)
        else ToolCallPart(piece.tool, piece.arguments, tool_call_id=piece.call_id or f"call_{number}_{index}")
        for index, piece in enumerate(pieces)
    ]
    asks = any(isinstance(part, ToolCallPart) for part in parts)
    return ModelResponse(
        parts=parts,
        usage=RequestUsage(input_tokens=10, output_tokens=5),
        finish_reason="tool_call" if asks else "stop",
        model_name="scripted",
    )


class OneModel:
    """The same model under every name."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def model(self, name: str) -> Model:
        return self._model
