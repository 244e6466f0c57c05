"""Limits of connections: their number, and the time for requests and responses."""

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .stream.response import TRANSPORT

log = logging.getLogger("perdure.api.connections")

#: Descriptors that are reserved for the store, Temporal, logs and other files of the process.
_RESERVE = 64
#: The limit when the system has none.
_MOST = 8192


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a connection. Times are in seconds."""

    connections: int
    # The request line and all headers. Also the bytes between two pieces of a body, or after the last one.
    head_bytes: int = 32_768
    head_time: float = 10.0
    # A body has this time, and more as long as this many bytes a second arrive.
    body_time: float = 30.0
    body_pace: int = 32_768
    # The rest of a body whose request has its response already.
    rest_time: float = 5.0
    # A response that the client does not read.
    stall_time: float = 60.0


def most_connections(wanted: int | None = None) -> int:
    """The number of descriptors of the process, less a reserve; fewer if the settings say so."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    available = _MOST if limit == resource.RLIM_INFINITY else max(limit // 2, limit - _RESERVE)
    return max(1, min(available, _MOST if wanted is None else wanted))


class Connections:
    """All connections of one server. When there are too many, the one that has been idle longest is closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        # Connections without a complete request head since they opened, or since their last response; oldest first.
        self._waiting: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def add(self, connection: "Connection") -> None:
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) <= self.limits.connections:
            return
        oldest = next(iter(self._waiting))
        self.discard(oldest)
        if oldest is connection:
            log.warning("%d connections are busy: another one is refused", len(self._open))
            connection.refuse(503, "Too many connections.", ("retry-after: 1",))
        else:
            oldest.transport.abort()

    def head_received(self, connection: "Connection") -> None:
        """A complete head has arrived: the connection is not closed for others until the response is sent."""
        self._waiting.pop(connection, None)

    def response_sent(self, connection: "Connection") -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def discard(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    """One connection, with limits on the time and the size of everything that the client sends or reads."""

    def __init__(self, all_connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all_connections
        self._limits = all_connections.limits
        # Whether a head is being read, and its bytes so far.
        self._in_head = True
        self._head_size = 0
        self._body_since = 0.0
        self._body_size = 0
        # Bytes since the last piece of the body: sizes of chunks, their extensions, trailers.
        self._around_body = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # --- transport callbacks --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        # An idle connection waits for the head of its next request.
        self._expect(self._limits.head_time, self._head_late)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self._expect(None)
        self._watch(False)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if not self._in_head:
                self._receive_body(data)
                return
            if self._receiving is None:
                self._expect(self._limits.head_time, self._head_late)
            room = self._limits.head_bytes - self._head_size
            if room <= 0:
                self.refuse(431, "The head of the request is too large.")
                return
            self._head_size += min(room, len(data))
            super().data_received(data[:room])
            data = data[room:]

    def _receive_body(self, data: bytes) -> None:
        self._body_size += len(data)
        self._around_body += len(data)
        super().data_received(data)
        if not self._in_head and self._around_body > self._limits.head_bytes:
            # They are not part of the body, so the body limit does not apply to them.
            log.info("connection cut: %d bytes of chunk extensions or trailers are too many", self._around_body)
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(False)

    # --- parser callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {TRANSPORT: self.transport}

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers arrive here too, while the request is already being handled. They are ignored.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size, self._around_body = False, 0, 0
        self._all.head_received(self)
        self._body_since, self._body_size = self.loop.time(), 0
        self._expect(self._limits.body_time, self._body_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._around_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._expect(None)
        super().on_message_complete()
        if self.cycle.response_complete:
            # The response was complete before the body: only now the connection waits for the next request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            # Closing waits until the client has read the response.
            self._watch(True)
            return
        if not self.pipeline:
            self._all.response_sent(self)
        if not self._in_head:
            # The rest of the body is dropped, but it must not arrive for ever.
            self._unset_keepalive_if_required()
            self._expect(self._limits.rest_time, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        # Closing would wait for a response that the client never read.
        self.transport.abort()

    # --- deadlines ------------------------------------------------------------------------------------------

    def refuse(self, status: int, why: str, headers: tuple[str, ...] = ()) -> None:
        """Send a response before there is a request, and close."""
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            # The response to the previous request is being sent; nothing may be written into it.
            self.transport.abort()
            return
        lines = [*headers, "content-type: text/plain; charset=utf-8", f"content-length: {len(why)}"]
        head = "\r\n".join((*lines, "connection: close", "", why))
        self.transport.write(STATUS_LINE[status] + head.encode())
        self.transport.close()
        self._watch(True)

    def _head_late(self) -> None:
        if self._head_size:
            self.refuse(408, "The head of the request took too long.")
        else:
            self.transport.abort()

    def _body_late(self) -> None:
        allowed = self._limits.body_time + self._body_size / self._limits.body_pace
        left = self._body_since + allowed - self.loop.time()
        if left > 0:
            self._expect(left, self._body_late)
        else:
            log.info("connection cut: a body took too long; %d bytes had arrived", self._body_size)
            self.transport.abort()

    def _expect(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """Set the deadline for the next data from the client."""
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None
        if seconds is not None and otherwise is not None:
            self._receiving = self.loop.call_later(seconds, otherwise)

    def _watch(self, stalled: bool) -> None:
        """Start or stop the deadline for a client that does not read."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = self.loop.call_later(self._limits.stall_time, self.transport.abort) if stalled else None
