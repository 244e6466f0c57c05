"""Connections: how many there may be, and how long each may take for what it sends and for what it is sent."""

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .stream.response import TRANSPORT

log = logging.getLogger("perdure.api.connections")

#: Descriptors that are kept for the store, Temporal, logs and whatever else a process opens.
_RESERVE = 64
#: Without a limit of the system there is still one of ours.
_MOST = 8192


@dataclass(frozen=True)
class ConnectionLimits:
    """What a connection may take. Times are in seconds."""

    connections: int
    # The request line and all headers; and what surrounds a body, between two pieces of it or after the last one.
    head_bytes: int = 32_768
    head_time: float = 10.0
    # A body has this time, and more as long as this many bytes a second arrive.
    body_time: float = 30.0
    body_pace: int = 32_768
    # What is left of a body whose request is answered already.
    rest_time: float = 5.0
    # An answer that a client does not take.
    stall_time: float = 60.0


def most_connections(wanted: int | None = None) -> int:
    """As many as the process has descriptors for, less a reserve; fewer if the settings want fewer."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    available = _MOST if limit == resource.RLIM_INFINITY else max(limit // 2, limit - _RESERVE)
    return max(1, min(available, _MOST if wanted is None else wanted))


class Connections:
    """All connections of one server. When there are too many, the one that has asked for nothing longest goes."""

    def __init__(self, terms: ConnectionLimits) -> None:
        self.terms = terms
        # Those that have sent no whole head since they came, or since their last answer; the oldest stands first.
        self._waiting: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def connection(self, **given: Any) -> "Connection":
        """Made by the server for each connection that it accepts."""
        return Connection(self, **given)

    def add(self, connection: "Connection") -> None:
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) <= self.terms.connections:
            return
        oldest = next(iter(self._waiting))
        self.discard(oldest)
        if oldest is connection:
            log.warning("%d connections are busy: another one is refused", len(self._open))
            connection.refuse(503, "Too many connections.", ("retry-after: 1",))
        else:
            oldest.transport.abort()

    def asked(self, connection: "Connection") -> None:
        """It has sent a whole head: it is not closed for others until it is answered."""
        self._waiting.pop(connection, None)

    def answered(self, connection: "Connection") -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def discard(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    """One connection, with a limit for each thing that a client can be slow or large at."""

    def __init__(self, all_connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all_connections
        self._terms = all_connections.terms
        # Whether a head is being read, and how much of it has come.
        self._in_head = True
        self._head_size = 0
        self._body_since = 0.0
        self._body_size = 0
        # Bytes since the last piece of the body: sizes of chunks, their extensions, trailers.
        self._around_body = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # --- what the transport says ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        # A connection on which nothing is asked for is one that waits for its head.
        self._expect(self._terms.head_time, self._head_late)
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
                self._expect(self._terms.head_time, self._head_late)
            room = self._terms.head_bytes - self._head_size
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
        if not self._in_head and self._around_body > self._terms.head_bytes:
            # They are no part of the body, so the limit of bodies does not end them.
            log.info("%d bytes of chunk extensions or trailers are too many", self._around_body)
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(False)

    # --- what the parser says -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {TRANSPORT: self.transport}

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here too, while the request is worked on already. They are no headers, and nobody reads them.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size, self._around_body = False, 0, 0
        self._all.asked(self)
        self._body_since, self._body_size = self.loop.time(), 0
        self._expect(self._terms.body_time, self._body_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._around_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._expect(None)
        super().on_message_complete()
        if self.cycle.response_complete:
            # It was answered before all of its body had come: only now it waits for the next request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            # Closing waits until the answer is taken.
            self._watch(True)
            return
        if not self.pipeline:
            self._all.answered(self)
        if not self._in_head:
            # What still comes of the body is thrown away; it must not come for ever.
            self._unset_keepalive_if_required()
            self._expect(self._terms.rest_time, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        # There may be an answer that was never taken; closing would wait for that.
        self.transport.abort()

    # --- deadlines ------------------------------------------------------------------------------------------

    def refuse(self, status: int, why: str, headers: tuple[str, ...] = ()) -> None:
        """Answer before there is a request, and close."""
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            # An answer to the request before is on its way; nothing may come in its middle.
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
        allowed = self._terms.body_time + self._body_size / self._terms.body_pace
        left = self._body_since + allowed - self.loop.time()
        if left > 0:
            self._expect(left, self._body_late)
        else:
            log.info("a body of which %d bytes came took too long", self._body_size)
            self.transport.abort()

    def _expect(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """Wait this long for what the client has to send next."""
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None
        if seconds is not None and otherwise is not None:
            self._receiving = self.loop.call_later(seconds, otherwise)

    def _watch(self, stalled: bool) -> None:
        """Wait for the client to take what it is sent."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = self.loop.call_later(self._terms.stall_time, self.transport.abort) if stalled else None
