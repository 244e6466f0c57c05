"""How content is written for destinations outside: as the conventions write it, in bounded size."""

import json
from collections.abc import Generator, Mapping
from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

from perdure.telemetry import content, spans
from perdure.telemetry.spans import Choices, Spanned


class Shown(Spanned):
    """A span that keeps what it was given to show."""

    def __init__(self) -> None:
        super().__init__(INVALID_SPAN, {})
        self.content: Mapping[str, str] = {}

    def show(self, event: str, content: Mapping[str, str]) -> None:
        self.content = content


@pytest.fixture
def bytes_at_most(request: pytest.FixtureRequest) -> Generator[int]:
    spans.choose(Choices(content=frozenset({"traces"}), content_bytes=request.param))
    yield request.param
    spans.choose(Choices())


def shown(messages: list[ModelMessage], response: ModelResponse) -> Shown:
    span = Shown()
    content.show_inference(span, messages, response)
    return span


ANSWER = ModelResponse(parts=[ThinkingPart("Hm"), TextPart("Done"), ToolCallPart("add", {"a": 1}, "c2")])
ASKED: list[ModelMessage] = [
    ModelRequest(parts=[UserPromptPart(["Look", BinaryContent(b"swordfish", media_type="image/png")])]),
    ModelResponse(parts=[ToolCallPart("add", {"a": 1}, "c1")]),
    ModelRequest(parts=[ToolReturnPart("add", {"sum": 1}, "c1")], instructions="Be brief."),
]


@pytest.mark.parametrize("bytes_at_most", [16_384], indirect=True)
def test_messages_are_written_as_the_conventions_write_them(bytes_at_most: int) -> None:
    found = shown(ASKED, ANSWER).content

    parsed: dict[str, Any] = {name: json.loads(text) for name, text in found.items()}
    assert parsed["gen_ai.system_instructions"] == [{"type": "text", "content": "Be brief."}]
    assert parsed["gen_ai.input.messages"] == [
        {"role": "user", "parts": [{"type": "text", "content": "Look"}, {"type": "file"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"sum": 1}}]},
    ]
    assert [part["type"] for part in parsed["gen_ai.output.messages"][0]["parts"]] == ["reasoning", "text", "tool_call"]


@pytest.mark.parametrize("bytes_at_most", [256, 300, 1_000, 16_384], indirect=True)
@pytest.mark.parametrize("text", ["a" * 50_000, "é€𝄞" * 20_000, '"\\\0' * 20_000], ids=["plain", "wide", "escaped"])
def test_whatever_is_said_fits(bytes_at_most: int, text: str) -> None:
    said: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart([text, text, "end"])], instructions=text),
        ModelResponse(parts=[TextPart(text), ToolCallPart("add", {"a": text}, "c1")]),
    ] * 3

    found = shown(said, ModelResponse(parts=[TextPart(text)] * 40)).content

    assert {name for name, value in found.items() if len(value.encode()) > bytes_at_most} == set()
    assert all(isinstance(json.loads(value), list) for value in found.values())


@pytest.mark.parametrize("bytes_at_most", [256], indirect=True)
def test_arguments_and_results_are_cut(bytes_at_most: int) -> None:
    span = Shown()

    content.show_call(span, {"text": "é" * 1_000}, "b" * 1_000)

    assert all(len(value.encode()) <= bytes_at_most and value.endswith("… (cut)") for value in span.content.values())


@pytest.mark.parametrize("bytes_at_most", [256], indirect=True)
def test_content_that_cannot_be_shown_fails_no_call(
    bytes_at_most: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = Shown()

    def broken(event: str, content: Mapping[str, str]) -> None:
        raise ZeroDivisionError(content["gen_ai.tool.call.result"])

    monkeypatch.setattr(span, "show", broken)

    content.show_call(span, {}, "the swordfish")

    assert "could not be exported: ZeroDivisionError" in caplog.text
    assert "swordfish" not in caplog.text
