"""A TCP connection that can go dead: a relay that stops forwarding without closing, and drops what it holds later."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Self

_PIECE = 65_536


class Proxy:
    """Relays every connection to one address, in a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._answers = asyncio.Event()
        self._answers.set()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stall(self) -> None:
        """Forward nothing any more, in neither direction; connections stay open, and new ones are accepted."""
        self._call(self._flows.clear)

    def stall_answers(self) -> None:
        """Forward requests, and hold back what comes back."""
        self._call(self._answers.clear)

    def resume(self) -> None:
        """Forward what was held back, and everything that follows."""
        self._call(self._flows.set)
        self._call(self._answers.set)

    def drop(self) -> None:
        """Break the connections that there are; what was held back is lost. New ones are served."""
        self._call(self._break)
        self._call(self._flows.set)
        self._call(self._answers.set)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in its own thread ----------------------------------------------------------------------------------

    def _call(self, what: Callable[[], None]) -> None:
        """Have it done before continuing."""

        async def done() -> None:
            what()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result()

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._server.close()
        self._break()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        # What waits to be forwarded belongs to a connection that is gone.
        for relay in self._relays:
            relay.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None
        self._relays.add(relay)
        self._open.add(writer)
        try:
            await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(writer)
            self._relays.discard(relay)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open.add(far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, self._flows))
                group.create_task(self._pump(far_reader, writer, self._flows, self._answers))
        except* OSError:
            pass
        finally:
            far_writer.transport.abort()
            self._open.discard(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *open: asyncio.Event) -> None:
        while True:
            piece = await reader.read(_PIECE)
            # The end of a connection is held back like everything else.
            for each in open:
                await each.wait()
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
