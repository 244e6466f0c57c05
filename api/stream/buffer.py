"""What the streams of this process hold for clients that have not taken it yet: bounded for all of them together."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("perdure.api.stream")


@dataclass(eq=False)
class Outflow:
    """One stream: what its connection holds, and the piece that waits to be taken by it."""

    name: str
    # None under a server that is not ours, which does not hand it out.
    transport: asyncio.WriteTransport | None
    waiting: int = 0
    over: bool = False

    @property
    def held(self) -> int:
        if self.over or self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + self.waiting

    def cut(self) -> None:
        """End the connection at once. Closing it would wait for what is unsent."""
        if self.transport is None:
            raise ConnectionError("this server cannot cut a connection")
        self.over = True
        self.transport.abort()


class Unsent:
    """Cuts the streams that have taken nothing for longest when all of them hold too much. Their clients come again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The one that has taken something last stands last.
        self._outflows: dict[Outflow, None] = {}
        # Never less than is held; what is held is asked for only when this passes the limit.
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
        """Count a piece until the connection takes it."""
        outflow.waiting = size
        self._estimate += size
        if self._estimate > self._limit:
            self._settle()
        yield
        outflow.waiting = 0
        if outflow in self._outflows:
            del self._outflows[outflow]
            self._outflows[outflow] = None

    def _settle(self) -> None:
        self._estimate = sum(each.held for each in self._outflows)
        for each in list(self._outflows):
            if self._estimate <= self._limit:
                return
            if held := each.held:
                self._estimate -= held
                log.warning("the stream of %s was cut: its client is behind, and all hold too much", each.name)
                each.cut()
