"""Two providers' ways to say the same: OpenAI's chat completions and Anthropic's messages, streamed."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .script import Plan

Json = dict[str, Any]


class Unpaired(Exception):
    """A tool call without its result, or a result without its call."""


@dataclass(frozen=True)
class Asked:
    """What matters of a request."""

    said: str
    rounds: int
    results: str


_numbers = itertools.count(1)


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _texts(content: Any) -> str:
    return " ".join(block["text"] for block in _blocks(content) if block["type"] == "text")


class OpenAI:
    path = "/v1/chat/completions"

    def asked(self, body: Json) -> Asked:
        said, rounds = "", 0
        results: list[str] = []
        due: set[str] = set()
        for message in body["messages"]:
            role = message["role"]
            if role == "tool":
                if message["tool_call_id"] not in due:
                    raise Unpaired(f"tool message for {message['tool_call_id']} does not follow its call")
                due.remove(message["tool_call_id"])
                results.append(_texts(message["content"]))
                continue
            if due:
                raise Unpaired(f"An assistant message with 'tool_calls' must be followed by tool messages: {due}")
            if role == "user":
                said, rounds, results = _texts(message["content"]), 0, []
            elif message.get("tool_calls"):
                rounds += 1
                due = {call["id"] for call in message["tool_calls"]}
        if due:
            raise Unpaired(f"No tool output found for {due}")
        return Asked(said, rounds, " | ".join(results))

    def error(self, status: int, message: str) -> Json:
        return {"error": {"message": message, "type": "scripted_error", "code": f"scripted_{status}"}}

    def events(self, plan: Plan, model: str) -> Iterator[bytes]:
        yield self._chunk(model, {"role": "assistant", "content": ""})
        if plan.thoughts:
            yield self._chunk(model, {"reasoning_content": plan.thoughts})
        for word in plan.words:
            yield self._chunk(model, {"content": word})
        for index, (name, arguments) in enumerate(plan.calls):
            function = {"name": name, "arguments": ""}
            started = {"index": index, "id": f"call_{next(_numbers)}", "type": "function", "function": function}
            yield self._chunk(model, {"tool_calls": [started]})
            yield self._chunk(model, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield self._chunk(model, {}, "tool_calls" if plan.calls else "stop", usage=_usage(plan))
        yield b"data: [DONE]\n\n"

    def _chunk(self, model: str, delta: Json, finish: str | None = None, usage: Json | None = None) -> bytes:
        chunk: Json = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        if usage:
            chunk["usage"] = usage
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _usage(plan: Plan) -> Json:
    spoken = len(plan.words) + 5 * len(plan.calls)
    return {"prompt_tokens": 10, "completion_tokens": spoken, "total_tokens": 10 + spoken}


class Anthropic:
    path = "/v1/messages"

    def asked(self, body: Json) -> Asked:
        said, rounds = "", 0
        results: list[str] = []
        due: set[str] = set()
        for message in body["messages"]:
            blocks = _blocks(message["content"])
            returned = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
            if returned != due:
                raise Unpaired(f"`tool_use` ids and `tool_result` ids differ: {returned ^ due}")
            due = {block["id"] for block in blocks if block["type"] == "tool_use"}
            rounds += bool(due)
            results += [_texts(block.get("content")) for block in blocks if block["type"] == "tool_result"]
            if message["role"] == "user" and (text := _texts(message["content"])):
                said, rounds, results = text, 0, []
        if due:
            raise Unpaired(f"`tool_use` ids were found without `tool_result` blocks: {due}")
        return Asked(said, rounds, " | ".join(results))

    def error(self, status: int, message: str) -> Json:
        return {"type": "error", "error": {"type": "scripted_error", "message": message}}

    def events(self, plan: Plan, model: str) -> Iterator[bytes]:
        usage = {"input_tokens": 10, "output_tokens": 1}
        message: Json = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "usage": usage,
        }
        yield self._event("message_start", message={**message, "stop_reason": None, "stop_sequence": None})
        index = itertools.count()
        if plan.thoughts:
            thinking: Json = {"type": "thinking", "thinking": "", "signature": ""}
            signature = {"type": "signature_delta", "signature": "scripted"}
            yield from self._block(
                next(index), thinking, [{"type": "thinking_delta", "thinking": plan.thoughts}, signature]
            )
        if plan.words:
            deltas = [{"type": "text_delta", "text": word} for word in plan.words]
            yield from self._block(next(index), {"type": "text", "text": ""}, deltas)
        for name, arguments in plan.calls:
            block: Json = {"type": "tool_use", "id": f"toolu_{next(_numbers)}", "name": name, "input": {}}
            yield from self._block(next(index), block, [{"type": "input_json_delta", "partial_json": arguments}])
        reason = {"stop_reason": "tool_use" if plan.calls else "end_turn", "stop_sequence": None}
        yield self._event("message_delta", delta=reason, usage={"output_tokens": _usage(plan)["completion_tokens"]})
        yield self._event("message_stop")

    def _block(self, index: int, block: Json, deltas: list[Json]) -> Iterator[bytes]:
        yield self._event("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield self._event("content_block_delta", index=index, delta=delta)
        yield self._event("content_block_stop", index=index)

    def _event(self, type: str, **data: Any) -> bytes:
        return f"event: {type}\ndata: {json.dumps({'type': type, **data})}\n\n".encode()


DIALECTS = {dialect.path: dialect for dialect in (OpenAI(), Anthropic())}
