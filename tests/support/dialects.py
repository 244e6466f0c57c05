"""Three ways to say the same: OpenAI's chat completions and responses, and Anthropic's messages, streamed."""

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
_NOTHING: Json = {}


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _texts(content: Any) -> str:
    return " ".join(block["text"] for block in _blocks(content) if block["type"] in ("text", "input_text"))


def conversation(body: Json) -> list[Json]:
    """The messages of a request, whatever its dialect calls them."""
    return body["messages"] if "messages" in body else body["input"]


def texts_of(body: Json) -> list[str]:
    """What people have said in a request, message by message."""
    said = [_texts(message["content"]) for message in conversation(body) if message.get("role") == "user"]
    return [text for text in said if text]


def instructions_in(body: Json) -> str:
    """What the model is told beside the conversation."""
    told = [body.get("system"), body.get("instructions")]
    told += [message["content"] for message in conversation(body) if message.get("role") in ("system", "developer")]
    return "\n\n".join(_texts(each) for each in told if each)


def begun_in(body: Json) -> tuple[Json, str | None]:
    """The request without what asks to go on with a reply, and the beginning of that reply, if that is asked."""
    *before, last = conversation(body)
    if last.get("role") != "user" or "was cut off" not in _texts(last["content"]):
        return body, None
    said = before.pop()
    if said.get("role") != "assistant" or not before:
        return body, None
    text = "".join(block["text"] for block in _blocks(said["content"]))
    return {**body, "messages" if "messages" in body else "input": before}, text


def _sse(type: str, **data: Any) -> bytes:
    return f"event: {type}\ndata: {json.dumps({'type': type, **data})}\n\n".encode()


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

    def too_long(self) -> Json:
        message = "This model's maximum context length is 1000 tokens. Please reduce the length of the messages."
        return {"error": {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}}

    def events(self, plan: Plan, model: str) -> Iterator[bytes]:
        yield self._chunk(model, {"role": "assistant", "content": ""})
        if plan.thoughts:
            yield self._chunk(model, {"reasoning_content": plan.thoughts})
        for word in plan.words:
            yield self._chunk(model, {"content": word})
        if plan.breaks:
            error = {"message": "scripted", "type": plan.breaks, "code": plan.breaks}
            yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            return
        for index, (name, arguments) in enumerate(plan.calls):
            function = {"name": name, "arguments": ""}
            started = {
                "index": index,
                "id": plan.call_id or f"call_{next(_numbers)}",
                "type": "function",
                "function": function,
            }
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
    tokens = len(plan.words) + 5 * len(plan.calls)
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": plan.prompt_tokens + tokens,
        **({"prompt_tokens_details": {"cached_tokens": plan.cached_tokens}} if plan.cached_tokens else {}),
        **({"completion_tokens_details": {"reasoning_tokens": len(plan.thoughts.split())}} if plan.thoughts else {}),
    }


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
            if message["role"] == "user" and (texts := [block for block in blocks if block["type"] == "text"]):
                # What two messages in a row said is in one here; the later one counts.
                said, rounds, results = texts[-1]["text"], 0, []
        if due:
            raise Unpaired(f"`tool_use` ids were found without `tool_result` blocks: {due}")
        return Asked(said, rounds, " | ".join(results))

    def error(self, status: int, message: str) -> Json:
        return {"type": "error", "error": {"type": "scripted_error", "message": message}}

    def too_long(self) -> Json:
        message = "prompt is too long: 1200 tokens > 1000 maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}

    def events(self, plan: Plan, model: str) -> Iterator[bytes]:
        usage = {"input_tokens": plan.prompt_tokens, "output_tokens": 1}
        message: Json = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "usage": usage,
        }
        yield _sse("message_start", message={**message, "stop_reason": None, "stop_sequence": None})
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
        if plan.breaks:
            yield _sse("error", error={"type": plan.breaks, "message": "scripted"})
            return
        for name, arguments in plan.calls:
            block: Json = {
                "type": "tool_use",
                "id": plan.call_id or f"toolu_{next(_numbers)}",
                "name": name,
                "input": {},
            }
            yield from self._block(next(index), block, [{"type": "input_json_delta", "partial_json": arguments}])
        reason = {"stop_reason": "tool_use" if plan.calls else "end_turn", "stop_sequence": None}
        yield _sse("message_delta", delta=reason, usage={"output_tokens": _usage(plan)["completion_tokens"]})
        yield _sse("message_stop")

    def _block(self, index: int, block: Json, deltas: list[Json]) -> Iterator[bytes]:
        yield _sse("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield _sse("content_block_delta", index=index, delta=delta)
        yield _sse("content_block_stop", index=index)


class Responses:
    path = "/v1/responses"

    def __init__(self) -> None:
        #: What came after a thought, by its id, and the id of the thought: neither may come back without the other.
        self._thought: dict[str, str] = {}

    def asked(self, body: Json) -> Asked:
        self._check_thoughts(conversation(body))
        said, rounds = "", 0
        results: list[str] = []
        due: set[str] = set()
        for item in conversation(body):
            kind = item.get("type", "message")
            if kind == "function_call":
                rounds += not due
                due.add(item["call_id"])
            elif kind == "function_call_output":
                if item["call_id"] not in due:
                    raise Unpaired(f"No tool call found for function call output with call_id {item['call_id']}.")
                due.remove(item["call_id"])
                results.append(item["output"] if isinstance(item["output"], str) else _texts(item["output"]))
            elif kind == "message" and item["role"] == "user":
                said, rounds, results = _texts(item["content"]), 0, []
        if due:
            raise Unpaired(f"No tool output found for function call {due}.")
        return Asked(said, rounds, " | ".join(results))

    def _check_thoughts(self, items: list[Json]) -> None:
        present = {item.get("id") for item in items}
        for item, after in itertools.zip_longest(items, items[1:], fillvalue=_NOTHING):
            own = item.get("id", "")
            if item.get("type") == "reasoning" and self._thought.get(after.get("id", "")) != own:
                raise Unpaired(f"Item '{own}' of type 'reasoning' was provided without its required following item.")
            if own in self._thought and self._thought[own] not in present:
                raise Unpaired(f"Item '{own}' was provided without its required 'reasoning' item.")

    def error(self, status: int, message: str) -> Json:
        return OPENAI.error(status, message)

    def too_long(self) -> Json:
        return OPENAI.too_long()

    def events(self, plan: Plan, model: str) -> Iterator[bytes]:
        numbers = itertools.count()
        for type, data in self._stream_events(plan, model):
            yield _sse(type, sequence_number=next(numbers), **data)

    def _stream_events(self, plan: Plan, model: str) -> Iterator[tuple[str, Json]]:
        response = _response(model)
        yield "response.created", {"response": response}
        yield "response.in_progress", {"response": response}
        output: list[Json] = []
        for inner, item in _items(plan):
            at = {"output_index": len(output)}
            yield "response.output_item.added", {**at, "item": _begun(item)}
            for type, data in inner:
                yield type, {**at, "item_id": item["id"], **data}
            yield "response.output_item.done", {**at, "item": item}
            output.append(item)
            if output[0]["type"] == "reasoning" and item is not output[0]:
                self._thought[item["id"]] = output[0]["id"]
        if plan.breaks:
            error = {"code": plan.breaks, "message": "scripted"}
            yield "response.failed", {"response": {**response, "status": "failed", "output": output, "error": error}}
            return
        usage = _usage(plan)
        usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        ended = {**response, "status": "completed", "output": output, "usage": usage}
        yield "response.completed", {"response": ended}


_StreamEvents = list[tuple[str, Json]]


def _response(model: str) -> Json:
    return {
        "id": f"resp_{next(_numbers)}",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "in_progress",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _begun(item: Json) -> Json:
    """An item as it is announced: nothing is in it yet."""
    return {**item, **{key: type(item[key])() for key in ("summary", "content", "arguments") if key in item}}


def _items(plan: Plan) -> Iterator[tuple[_StreamEvents, Json]]:
    """What an answer is made of: the events of each item, and the item in the end."""
    if plan.thoughts:
        yield _thought(plan.thoughts)
    if plan.words:
        yield _message(plan.words)
    for name, arguments in plan.calls:
        yield _call(name, arguments, plan.call_id)


def _thought(thoughts: str) -> tuple[_StreamEvents, Json]:
    part = {"type": "summary_text", "text": thoughts}
    events: _StreamEvents = [
        ("response.reasoning_summary_part.added", {"summary_index": 0, "part": {**part, "text": ""}}),
        ("response.reasoning_summary_text.delta", {"summary_index": 0, "delta": thoughts}),
        ("response.reasoning_summary_text.done", {"summary_index": 0, "text": thoughts}),
        ("response.reasoning_summary_part.done", {"summary_index": 0, "part": part}),
    ]
    item = {"id": f"rs_{next(_numbers)}", "type": "reasoning", "summary": [part], "encrypted_content": "scripted"}
    return events, item


def _message(words: tuple[str, ...]) -> tuple[_StreamEvents, Json]:
    part: Json = {"type": "output_text", "text": "".join(words), "annotations": [], "logprobs": []}
    events: _StreamEvents = [
        ("response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}),
        *(("response.output_text.delta", {"content_index": 0, "delta": word, "logprobs": []}) for word in words),
        ("response.output_text.done", {"content_index": 0, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {"content_index": 0, "part": part}),
    ]
    item = {"id": f"msg_{next(_numbers)}", "type": "message", "role": "assistant", "status": "completed"}
    return events, {**item, "content": [part]}


def _call(name: Any, arguments: str, call_id: Any) -> tuple[_StreamEvents, Json]:
    events: _StreamEvents = [
        ("response.function_call_arguments.delta", {"delta": arguments}),
        ("response.function_call_arguments.done", {"arguments": arguments, "name": name}),
    ]
    number = next(_numbers)
    item = {
        "id": f"fc_{number}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id or f"call_{number}",
    }
    return events, {**item, "name": name, "arguments": arguments}


OPENAI = OpenAI()
DIALECTS = {dialect.path: dialect for dialect in (OPENAI, Responses(), Anthropic())}
