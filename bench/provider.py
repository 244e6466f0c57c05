"""A model provider without latency, over real HTTP: `python -m bench.provider PORT`.

It speaks OpenAI's chat completions, streamed. To `rounds N` it answers with a tool call N times, to `ask` with a call
that needs an approval, to `hand N` with N calls of an agent, to `program N` with a program that makes N calls one after
the other, to `plan N` with a plan of N steps, to `done N` with the call that marks its Nth step as done, to
`tokens N R` with N tokens, R in a second, each of which says when it was sent; to all else with one short text.
"""

import asyncio
import signal
import sys
from time import time
from typing import Any, cast

import orjson


def reply(request: dict[str, Any]) -> bytes:
    """The answer as server-sent events."""
    messages: list[dict[str, Any]] = request["messages"]
    latest = max(place for place, message in enumerate(messages) if message["role"] == "user")
    said = messages[latest]["content"]
    had = sum(message["role"] == "tool" for message in messages[latest:])
    match said.split() if isinstance(said, str) else []:
        case ["ask"] if not had:
            return _tool_calls(_call(0, "guarded"))
        case ["rounds", count] if had < int(count):
            return _tool_calls(_call(had, "nothing"))
        case ["hand", count] if not had:
            return _tool_calls(*(_call(number, "helper", message="hello") for number in range(int(count))))
        case ["plan", count] if not had:
            titles = [f"step {number}" for number in range(1, int(count) + 1)]
            return _tool_calls(_call(0, "planning_setup_plan", objective="Be measured", initial_steps=titles))
        case ["done", step] if not had:
            return _tool_calls(_call(0, "planning_update_step", step_id=int(step), status="done"))
        case ["program", count] if not had:
            code = f"for _ in range({int(count)}):\n    await nothing()"
            return _tool_calls(_call(0, "code_mode", code=code))
        case _:
            return _TEXT


def _events(*deltas: dict[str, Any], finish: str) -> bytes:
    choices: list[dict[str, Any]] = [
        *({"index": 0, "delta": delta, "finish_reason": None} for delta in deltas),
        {"index": 0, "delta": {}, "finish_reason": finish},
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    chunks: list[dict[str, Any]] = [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}]
    return b"".join(map(_encoded, chunks)) + b"data: [DONE]\n\n"


def _event(delta: dict[str, Any]) -> bytes:
    return _encoded({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def _encoded(chunk: dict[str, Any]) -> bytes:
    head = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 0, "model": "bench"}
    return b"data: " + orjson.dumps({**head, **chunk}) + b"\n\n"


def _call(number: int, tool: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"call_{number:04}", "type": "function", "function": function}


def _tool_calls(*calls: dict[str, Any]) -> bytes:
    indexed = [{"index": index, **call} for index, call in enumerate(calls)]
    return _events({"role": "assistant", "tool_calls": indexed}, finish="tool_calls")


_TEXT = _events({"role": "assistant", "content": ""}, {"content": "Hello "}, {"content": "there."}, finish="stop")


class Provider(asyncio.Protocol):
    """One connection. Requests come one after the other, each with a length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            body = self._received[end + 4 : end + 4 + size]
            if len(body) < size:
                return
            del self._received[: end + 4 + size]
            request = orjson.loads(body)
            said = request["messages"][-1]["content"]
            if isinstance(said, str) and said.startswith("tokens "):
                self._paced = asyncio.create_task(self._answer_paced(*map(int, said.split()[1:])))
            else:
                self._answer(reply(request))

    def _answer(self, events: bytes) -> None:
        self._transport.write(_HEAD + _chunk(events) + _chunk(b""))

    async def _answer_paced(self, count: int, rate: int) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._transport.write(_HEAD)
        for number in range(count):
            await asyncio.sleep(begun + number / rate - loop.time())
            self._transport.write(_chunk(_event({"content": f"{time():.6f} "})))
        self._transport.write(_chunk(_events(finish="stop")) + _chunk(b""))


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


async def main(port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(Provider, "127.0.0.1", port)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
