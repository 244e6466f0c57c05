"""What people and the model say: the message `plan 7: look pay/charge` asks for two calls, then for another one."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart
from pydantic_ai.messages import UserPromptPart as Said

from perdure.harness.prompt import CUT_OFF
from perdure.protocol.deliveries import InputResponse
from perdure.store.inputs import InputRow

Answer: TypeAlias = Literal["approve", "deny", "edit", "red", "nonsense"]


def without_beginning(messages: Sequence[ModelMessage]) -> tuple[Sequence[ModelMessage], str]:
    """The messages without the beginning of a reply that the model is to go on with, and that beginning."""
    *before, said, note = messages if len(messages) > 2 else (*messages, None, None)
    if not isinstance(said, ModelResponse) or note is None:
        return messages, ""
    asked = any(isinstance(part, Said) and CUT_OFF in str(part.content) for part in note.parts)
    return (before, said.text or "") if asked else (messages, "")


def next_words(messages: Sequence[ModelMessage]) -> list[tuple[str, int]]:
    """What the last plan says is next, and its number; the rounds of a plan are separated by slashes."""
    number, rounds, done = 0, [""], 0
    for message in messages:
        if isinstance(message, ModelResponse):
            done += 1
            continue
        for part in message.parts:
            if isinstance(part, Said) and isinstance(part.content, str) and part.content.startswith("plan "):
                head, _, plan = part.content.removeprefix("plan ").partition(":")
                number, rounds, done = int(head), plan.split("/"), 0
    return [(word, number) for word in (rounds[done].split() if done < len(rounds) else [])]


def call(word: str, n: int, index: int) -> ToolCallPart:
    # Providers hand out the same ids again and again.
    call_id = f"c{index}"
    if word == "ask":
        return ToolCallPart("ask_question", {"prompt": "Which?", "options": ["red", "blue"]}, tool_call_id=call_id)
    return ToolCallPart(word, {"n": n}, tool_call_id=call_id)


def response_to(row: InputRow, how: Answer) -> InputResponse:
    asked = row.request.request_id
    if row.request.kind == "question":
        option = {"approve": "red", "deny": "blue"}.get(how, how)
        return InputResponse(request_id=asked, option_id=option)
    match how:
        case "edit":
            return InputResponse(request_id=asked, option_id="approve", arguments={"n": row.request.input["n"] + 1000})
        case "approve":
            return InputResponse(request_id=asked, option_id="approve")
        case _:
            return InputResponse(request_id=asked, option_id="deny")
