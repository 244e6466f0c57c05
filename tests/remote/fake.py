"""A server that speaks the protocol as badly as a test wants: `Fake(hang=True)`, `Fake(status=500)`, …"""

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

Json = dict[str, Any]


@dataclass
class Asked:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json


@dataclass
class Fake:
    """What it answers. Each field may be changed while it runs."""

    #: To a start: this status, or never anything.
    status: int = 202
    hang: bool = False
    #: So many starts are answered with 503 first.
    refuses: int = 0
    #: Whether it forgets sessions, sends no id, or an id that is none.
    session: Json | None = field(default_factory=lambda: {"sessionId": "wrun_fake", "ok": True})
    #: Its stream: the status, the events, and whether it ends after them; or words for ever.
    stream_status: int = 200
    events: list[Json] = field(default_factory=list[Json])
    closes: bool = False
    floods: bool = False
    raw: bytes | None = None
    #: To a cancel.
    cancel_status: int = 404
    cancel: Json = field(default_factory=dict[str, Any])
    #: To a callback, one status after the other; the last one stays.
    callbacks: list[int] = field(default_factory=lambda: [202])
    redirect: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        self.asked: list[Asked] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, method: str, ending: str) -> list[Asked]:
        return [each for each in self.asked if each.method == method and each.path.partition("?")[0].endswith(ending)]

    @property
    def starts(self) -> list[Asked]:
        return self.of("POST", "/eve/v1/session")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._exchange(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines if each)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        self.asked.append(Asked(method, path, headers, json.loads(raw) if raw else {}))
        if method == "GET":
            await self._stream(writer, path)
        elif path.endswith("/cancel"):
            _answer(writer, self.cancel_status, self.cancel)
        elif "/callback/" in path:
            status = self.callbacks.pop(0) if len(self.callbacks) > 1 else self.callbacks[0]
            _answer(writer, status, {}, {"location": self.redirect} if self.redirect else {})
        elif self.hang:
            await asyncio.Event().wait()
        elif self.refuses > 0:
            self.refuses -= 1
            _answer(writer, 503, {})
        else:
            _answer(writer, self.status, self.session or {})
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, path: str) -> None:
        if self.stream_status != 200:
            _answer(writer, self.stream_status, {})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n")
        if self.raw is not None:
            writer.write(self.raw)
        for event in self.events[int(path.rpartition("=")[2]) :]:
            writer.write(json.dumps(event).encode() + b"\n")
        await writer.drain()
        while self.floods:
            writer.write(
                json.dumps({"type": "message.appended", "data": {"messageDelta": "x" * 1000}}).encode() + b"\n"
            )
            await writer.drain()
            await asyncio.sleep(0)
        if not self.closes and self.raw is None:
            await asyncio.Event().wait()


def _answer(writer: asyncio.StreamWriter, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
    content = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n{more}"
        "connection: close\r\n\r\n".encode()
        + content
    )
