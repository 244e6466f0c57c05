"""A model provider of our own, over real HTTP: `python -m tests.support.provider --port 0` prints its port.

What it answers is said by the message (see `script`). `GET /requests` and `GET /count` return what it was asked, so
that a test can see whether something was asked twice; `POST /reset` forgets.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from .dialects import DIALECTS, Unpaired, begun_in, conversation, instructions_in, texts_of
from .script import Plan, gone_on, plan

_Headers = dict[str, str]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Provider:
    """The server, in whatever loop starts it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        #: Streams that the client closed before their end.
        self.abandoned = 0
        #: Requests in which a tool call had no result, or a result no call.
        self.unpaired: list[str] = []
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections.values():
            connection.transport.abort()
        await asyncio.gather(*self._connections)

    def environment(self) -> dict[str, str]:
        """What makes the official SDKs come here."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "sk-scripted-not-a-secret",
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "sk-scripted-not-a-secret",
        }

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.abandoned += 1
        finally:
            del self._connections[task]
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection has ended."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                raise
            return False
        line, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines if each)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return await self._answer(method, path.partition("?")[0], headers, body, reader, writer)

    async def _answer(
        self,
        method: str,
        path: str,
        headers: _Headers,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        match method, path:
            case "GET", "/requests":
                _json(writer, 200, {"requests": self.requests})
            case "GET", "/count":
                repeated = {key: count for key, count in self.counts.items() if count > 1}
                counts = {"total": len(self.requests), "distinct": len(self.counts), "repeated": repeated}
                _json(writer, 200, {**counts, "abandoned": self.abandoned, "unpaired": self.unpaired})
            case "POST", "/reset":
                self.requests.clear()
                self.counts.clear()
                self.unpaired.clear()
                _json(writer, 200, {})
            case "POST", _ if path in DIALECTS:
                return await self._ask(path, body, headers, reader, writer)
            case _:
                _json(writer, 404, {"error": {"message": f"No route {method} {path}"}})
        await writer.drain()
        return True

    async def _ask(
        self, path: str, raw: bytes, sent: _Headers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        dialect = DIALECTS[path]
        body, begun = begun_in(json.loads(raw))
        messages = conversation(body)
        key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        self.counts[key] += 1
        try:
            asked = dialect.asked(body)
        except Unpaired as unpaired:
            self.unpaired.append(str(unpaired))
            _json(writer, 400, dialect.error(400, str(unpaired)))
            return True
        tools = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", [])]
        self.requests.append(
            {"key": key, "path": path, "model": body["model"], "said": asked.said, "round": asked.rounds}
            | {"messages": len(messages), "tools": tools, "time": self.counts[key]}
            | {"digest": hashlib.sha256(raw).hexdigest()}
            | {"instructions": instructions_in(body)}
            | {"at": time.time(), "results": asked.results, "texts": texts_of(body)[-20:], "begun": begun}
        )
        made = plan(asked.said, asked.rounds, asked.results)
        if begun is not None:
            made = gone_on(made, begun)
        self.said[asked.said] += 1
        refused = self.said[asked.said] if made.fail and made.fail.once else self.counts[key]
        if made.fail and refused <= made.fail.times:
            headers = {"retry-after": made.fail.retry_after} if made.fail.retry_after else {}
            message = f"scripted failure {made.fail.status}"
            if made.fail.quotes:
                message += f" for {sent.get('authorization') or sent.get('x-api-key')}"
            _json(writer, made.fail.status, dialect.error(made.fail.status, message), headers)
            return True
        if made.limit is not None and len(json.dumps(messages)) > made.limit:
            _json(writer, 400, dialect.too_long())
            return True
        if made.hang:
            # Until the client has had enough.
            await reader.read()
            raise ConnectionResetError
        events = [made.junk] if made.junk else list(dialect.events(made, body["model"]))
        return await _stream(writer, reader, events, made)


async def _stream(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, events: list[bytes], made: Plan) -> bool:
    limit = made.cut_after if made.cut_after is not None else made.stop_after
    shown = events if limit is None else events[: limit + 1]
    writer.write(_HEAD)
    if made.delay:
        for event in shown:
            writer.write(_chunk(event))
            await writer.drain()
            await asyncio.sleep(made.delay)
            if reader.at_eof():
                raise ConnectionResetError
    else:
        writer.write(_chunk(b"".join(shown)))
    await writer.drain()
    if made.cut_after is not None:
        return False
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _json(writer: asyncio.StreamWriter, status: int, body: object, headers: _Headers | None = None) -> None:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Scripted", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


@contextlib.asynccontextmanager
async def serving(port: int = 0) -> AsyncGenerator[Provider]:
    provider = Provider()
    await provider.start(port)
    try:
        yield provider
    finally:
        await provider.stop()


async def main(port: int) -> None:
    async with serving(port) as provider:
        print(provider.port, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.parse_args().port))
