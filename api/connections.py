"""Limits of connections: their number, and the time for requests and responses."""

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .stream.response import TRANSPORT

log = logging.getLogger("perdure.api.connections")

#: Descriptors that are reserved for the store, Temporal, logs and other files of the process.
_RESERVE = 64
#: The limit when the system has none.
_MOST = 8192
#: What the rest of a request may have by itself: refused files of a usual size.
REST_BYTES = 67_108_864
#: The same, when its head was refused.
_REST_OF_HEAD = 1_048_576


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
    # The rest of a request that has its response already: this time, more at the same pace, and so many bytes.
    rest_time: float = 5.0
    rest_bytes: int = REST_BYTES
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

    def counts(self, connection: "Connection") -> bool:
        return connection in self._open

    def discard(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class _Ending:
    """The transport as a response sees it: whose end is the connection's to decide."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


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
        # Whether the request that is being received has its response, and whether that was the last one.
        self._in_rest = False
        self._ended = False
        self._rest_bytes = self._limits.rest_bytes
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
        if self._ended:
            self._count(data)
            return
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
        self._count(data)
        if self.transport.is_closing():
            return
        self._around_body += len(data)
        super().data_received(data)
        if not self._in_head and self._around_body > self._limits.head_bytes:
            # They are not part of the body, so the body limit does not apply to them.
            log.info("connection cut: %d bytes of chunk extensions or trailers are too many", self._around_body)
            self.transport.abort()

    def _count(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._in_rest and self._body_size > self._rest_bytes:
            log.info("connection cut: %d bytes arrived after the response to their request", self._body_size)
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
        self._in_rest = False
        self._expect_body(self._limits.body_time)
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _Ending(self.transport, self._end))

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
            self._expect_rest()

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
        if self._all.counts(self):
            self._rest_bytes = _REST_OF_HEAD
            self._linger()
        else:
            # There is no room for a connection that lingers.
            self.transport.close()
            self._watch(True)

    def _end(self) -> None:
        """Close after a response, or once the client has sent the rest of the request."""
        if self._in_head or self.pipeline or not self.cycle.response_complete:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Drop what the client still sends, and close when it does: to close before destroys the response.

        The system answers what arrives after that with a reset, and a client that gets one has nothing left to read.
        """
        self._ended = True
        self._expect_rest()
        try:
            self.transport.write_eof()
        except OSError:
            # The client has gone.
            self.transport.abort()

    def _head_late(self) -> None:
        if self._head_size:
            self.refuse(408, "The head of the request took too long.")
        else:
            self.transport.abort()

    def _body_late(self) -> None:
        least = self._limits.rest_time if self._in_rest else self._limits.body_time
        allowed = least + self._body_size / self._limits.body_pace
        left = self._body_since + allowed - self.loop.time()
        if left > 0:
            self._expect(left, self._body_late)
        else:
            log.info("connection cut: a body took too long; %d bytes had arrived", self._body_size)
            self.transport.abort()

    def _expect_body(self, seconds: float) -> None:
        self._body_since, self._body_size = self.loop.time(), 0
        self._expect(seconds, self._body_late)

    def _expect_rest(self) -> None:
        self._in_rest = True
        self._expect_body(self._limits.rest_time)

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
