"""The least HTTP client: what is measured is the product, and not the one who asks it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson


class Refused(Exception):
    """The API did not do what the benchmark asked."""


@dataclass(frozen=True)
class Answer:
    """What a request was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


class Connection:
    """One kept connection to the API; one request at a time."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._port = port
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(port, *await _opened(port))

    def close(self) -> None:
        self._writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = orjson.dumps(body)
        if self._reader.at_eof():
            # The API closes connections that idle.
            self._writer.close()
            self._reader, self._writer = await _opened(self._port)
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        status, headers = await self._head()
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if status not in (200, 202):
            raise Refused(f"POST {path} was answered {status}: {answer.decode()}")
        return orjson.loads(answer)

    async def get(self, path: str, *, prefer: str | None = None) -> Answer:
        """The answer, which is no stream."""
        status, headers = await self._asked(path, "" if prefer is None else f"prefer: {prefer}\r\n")
        return Answer(status, headers, await self._reader.readexactly(int(headers.get("content-length", "0"))))

    async def drain(self, path: str) -> int:
        """The bytes of a stream that ends."""
        size = 0
        async for chunk in self.chunks(path):
            size += len(chunk)
        return size

    async def chunks(self, path: str) -> AsyncIterator[bytes]:
        """A stream, as it comes."""
        status, headers = await self._asked(path)
        if status != 200 or headers.get("transfer-encoding") != "chunked":
            raise Refused(f"GET {path} was answered {status} {headers}")
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def events(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Events of an NDJSON stream, for ever."""
        rest = b""
        async for chunk in self.chunks(path):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    yield orjson.loads(line)

    async def _asked(self, path: str, more: str = "") -> tuple[int, dict[str, str]]:
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}\r\n".encode())
        return await self._head()

    async def _head(self) -> tuple[int, dict[str, str]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=2**20)
