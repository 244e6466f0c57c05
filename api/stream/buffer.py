"""Bounds the bytes that all streams of this process together keep: for slow clients, and for those who keep up."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("perdure.api.stream")


@dataclass(eq=False)
class Outflow:
    """One stream: the write buffer of its connection, and the chunk that waits for room there."""

    name: str
    # None under another ASGI server, which does not expose the transport.
    transport: asyncio.WriteTransport | None
    waiting: int = 0
    ended: bool = False

    @property
    def held(self) -> int:
        if self.ended or self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + self.waiting

    def cut(self) -> None:
        """Abort the connection. Closing it would wait for unsent data."""
        if self.transport is None:
            raise ConnectionError("this server cannot cut a connection")
        self.ended = True
        self.transport.abort()


class Unsent:
    """Aborts the streams that have read nothing for the longest time when the total is too large. Clients reconnect."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Ordered by the last read: the most recent one is last.
        self._outflows: dict[Outflow, None] = {}
        # An upper bound of the total. The exact total is computed only when this exceeds the limit.
        self._estimate = 0

    @contextmanager
    def of(self, outflow: Outflow) -> Generator[None]:
        """Count this stream while it is open."""
        self._outflows[outflow] = None
        try:
            yield
        finally:
            self._outflows.pop(outflow, None)

    @contextmanager
    def sending(self, outflow: Outflow, size: int) -> Generator[None]:
        """Count a chunk until the connection accepts it."""
        outflow.waiting = size
        self._estimate += size
        if self._estimate > self._limit:
            self._cut_slowest()
        yield
        outflow.waiting = 0
        if outflow in self._outflows:
            del self._outflows[outflow]
            self._outflows[outflow] = None

    def _cut_slowest(self) -> None:
        self._estimate = sum(each.held for each in self._outflows)
        for each in list(self._outflows):
            if self._estimate <= self._limit:
                return
            if held := each.held:
                self._estimate -= held
                log.warning("the stream of %s was cut: its client is behind, and all hold too much", each.name)
                each.cut()


class Ring(Protocol):
    """The recent lines of one session."""

    def empty(self) -> None:
        """Drop all lines: readers that need them page from the store."""
        ...


class Rings:
    """Empties the rings that got nothing for the longest time when all of them together are too large.

    A ring is full after some replies and stays so while its session has a reader, whether or not anything happens.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Ordered by the last line: the most recent one is last.
        self._sizes: dict[Ring, int] = {}
        self.size = 0

    def resized(self, ring: Ring, size: int) -> None:
        """The ring has got a line, or has gone."""
        self.size += size - self._sizes.pop(ring, 0)
        if size:
            self._sizes[ring] = size
        while self.size > self._limit and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.size -= self._sizes.pop(oldest)
            oldest.empty()
