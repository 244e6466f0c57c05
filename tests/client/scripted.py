"""A server that answers as told, over real HTTP: for what no API of ours does, or does on request."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Told:
    """One response: a body as it is, or JSON. `cut`: the connection breaks behind it. `hang`: it stays open.

    `drip`: spaces follow, one every so many seconds, without an end.
    """

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut: bool = False
    hang: bool = False
    drip: float | None = None


#: What the server answers to a request.
Script = Callable[[Asked], Told]


@dataclass
class Scripted:
    url: str
    asked: list[Asked]

    def of(self, method: str, word: str) -> list[Asked]:
        return [each for each in self.asked if each.method == method and word in each.path]


def line(type: str, index: int | None, **data: Any) -> bytes:
    """An event as a line of a stream."""
    meta = {} if index is None else {"meta": {"index": index, "attempt": 1}}
    return json.dumps({"type": type, "data": data, **meta}).encode() + b"\n"


def accepted(delivery_id: str | None = "dlv_1", **more: Any) -> Told:
    return Told(
        202, {"ok": True, "sessionId": "ses_1", "continuationToken": "eve:1", "deliveryId": delivery_id, **more}
    )


def in_turn(*answers: Told) -> Callable[[], Told]:
    """Each of them once, then the last one for ever."""
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def api(posts: Sequence[Told], streams: Sequence[Told], **others: Told) -> Script:
    """An API with these answers to deliveries and to readers of a stream; `others` by a word of the path."""
    post, stream = in_turn(*posts), in_turn(*streams)

    # An older one does not know the route.
    missing = {"/v1/deliveries": Told(404, {"error": "Not here.", "ok": False})}

    def answer(asked: Asked) -> Told:
        for word, told in {**missing, **others}.items():
            if word in asked.path:
                return told
        return post() if asked.method == "POST" else stream()

    return answer


@asynccontextmanager
async def serving(script: Script) -> AsyncGenerator[Scripted]:
    asked: list[Asked] = []
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _exchange(reader, writer, asked, script)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield Scripted(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked)
    finally:
        server.close()
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[Asked], script: Script
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in head[1:] if each)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    asked.append(Asked(method, path, headers, json.loads(body) if body else None))
    told = script(asked[-1])
    content = told.body if isinstance(told.body, bytes) else json.dumps(told.body).encode()
    is_short = told.cut or told.hang or told.drip is not None
    lines = [f"HTTP/1.1 {told.status} Scripted", "connection: close"]
    # Of a response that breaks off more was promised than comes.
    lines += [f"content-length: {len(content) + (1_000_000 if is_short else 0)}"]
    lines += [f"{name}: {value}" for name, value in told.headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    await writer.drain()
    while told.drip is not None:
        await asyncio.sleep(told.drip)
        writer.write(b" ")
        await writer.drain()
    if told.hang:
        await reader.read()
    elif not told.cut:
        writer.write_eof()
        # Closing with unread bytes would reset the connection.
        await reader.read()
    else:
        writer.close()
        await writer.wait_closed()
