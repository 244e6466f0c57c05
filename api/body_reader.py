"""Reads request bodies within limits. Large bodies do not block other requests."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import orjson
from starlette.requests import Request

from perdure.errors import Invalid, TooLarge, Unavailable

Fields: TypeAlias = dict[str, Any]
T = TypeVar("T")

#: Larger bodies are parsed in a thread, and count against the shared limit of all large bodies.
LARGE = 262_144
#: The most values in a body. The parser holds the GIL, and a value costs 50 to 1000 times its bytes.
MOST_VALUES = 100_000
#: How many bodies of the greatest size all requests together may hold at once.
_AT_ONCE = 2
_THREADS = 2


class BodyReader:
    """Reads the bodies of one API as JSON objects."""

    def __init__(self, limit: int, *, room: int | None = None) -> None:
        """`limit` is in bytes for one body, `room` for all large bodies that are in use at once."""
        self._limit = limit
        self._room = room if room is not None else _AT_ONCE * limit
        self._held = 0
        # A pool of its own, so that other threaded work does not wait for bodies.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-body")

    @contextmanager
    def accounted(self, request: Request) -> Generator[None]:
        """Release the room of the request's body when the request ends."""
        request.state.body_bytes = 0
        try:
            yield
        finally:
            self._held -= request.state.body_bytes

    async def read(self, request: Request, parse: Callable[[Fields], T], *, optional: bool = False) -> T:
        """The parsed body. Raises `TooLarge` before more than the limit is stored."""
        raw = await self._bytes(request)
        if optional and not raw.strip():
            return parse({})
        if len(raw) <= LARGE:
            return parse(_fields(raw))
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: parse(_fields(raw)))

    async def _bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            raise body_too_large(int(declared), self._limit)
        body, values = bytearray(), ValueCount()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limit:
                raise body_too_large(len(body), self._limit)
            values.add(chunk)
            if values.count > MOST_VALUES:
                raise _too_many_values(values.count)
            self._take(request, max(0, len(body) - LARGE))
        return bytes(body)

    def _take(self, request: Request, size: int) -> None:
        """Reserve `size` bytes of the room for this request."""
        more = size - request.state.body_bytes
        if self._held + more > self._room:
            raise Unavailable(f"Large bodies hold {self._held} bytes already.")
        self._held += more
        request.state.body_bytes = size


class ValueCount:
    """Counts the values of a JSON text, piece by piece and without parsing: an upper bound."""

    def __init__(self) -> None:
        self.count = 1
        self._in_string = False
        self._rest = b""

    def add(self, piece: bytes) -> None:
        piece = self._rest + piece
        # An escape must not be split between two pieces.
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = b"\\" if backslashes % 2 else b""
        piece = piece[: len(piece) - len(self._rest)]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1 if self._in_string else 0 :: 2])
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        self._in_string ^= len(parts) % 2 == 0


def _fields(raw: bytes) -> Fields:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise Invalid("Invalid JSON body.") from None
    if isinstance(value, list):
        # The contract accepts an array as an object without fields.
        return {}
    if not isinstance(value, dict):
        raise Invalid("Expected a JSON object.")
    return cast("Fields", value)


def body_too_large(size: int, limit: int) -> TooLarge:
    violation = {"byteLength": size, "kind": "too-large", "limit": limit, "mediaType": "application/json"}
    return TooLarge(f"application/json ({size} bytes) exceeds the {limit}-byte upload limit.", violations=[violation])


def _too_many_values(count: int) -> TooLarge:
    violation = {"kind": "too-many-values", "limit": MOST_VALUES, "mediaType": "application/json", "values": count}
    return TooLarge(f"application/json holds more than {MOST_VALUES} values.", violations=[violation])
