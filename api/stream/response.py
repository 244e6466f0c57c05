"""Streaming responses, sent as fast as the client reads them; one has what a broadcast has, in one face."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.store.values import SessionRow
from perdure.telemetry import spans

from .broadcast import Broadcasts
from .buffer import Outflow
from .faces import Face

log = logging.getLogger("perdure.api.stream")

#: Where our server puts the connection's transport. ASGI cannot abort a connection, and closing waits for unsent data.
TRANSPORT = "perdure.transport"


class LiveResponse(Response):
    """A response that goes on while things happen. A slow client delays only itself."""

    def __init__(self, broadcasts: Broadcasts, name: str, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        # A stream has no length.
        del self.headers["content-length"]
        self._broadcasts = broadcasts
        # Of what is streamed, for the log.
        self._name = name

    def chunks(self) -> AsyncGenerator[bytes]:
        """What is sent, piece by piece. The next piece is asked for when the connection has accepted this one."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outflow = Outflow(self._name, scope.get("extensions", {}).get(TRANSPORT))
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        pump = asyncio.create_task(self._pump(send, outflow))
        try:
            await asyncio.wait((disconnected, pump), return_when=asyncio.FIRST_COMPLETED)
            if pump.done() and (error := pump.exception()) is not None:
                log.warning("the stream of %s was cut: %s", self._name, str(error) or type(error).__name__)
                # Not a clean end: the client must know that there are more events, and reconnect.
                outflow.cut()
                await disconnected
        finally:
            for task in (disconnected, pump):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(disconnected, pump, return_exceptions=True)

    async def _pump(self, send: Send, outflow: Outflow) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with spans.open_stream(), self._broadcasts.unsent.of(outflow):
            async with contextlib.aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    await self._send(send, chunk, outflow)
            # It waits until the connection has room again after the last chunk, and may wait no longer than that.
            await self._send(send, b"", outflow, more=False)

    async def _send(self, send: Send, chunk: bytes, outflow: Outflow, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._broadcasts.pace.stall):
                with self._broadcasts.unsent.sending(outflow, len(chunk)):
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except TimeoutError:
            raise TimeoutError(f"the client took nothing for {self._broadcasts.pace.stall:g} s") from None


class EventStream(LiveResponse):
    """A session's events from `start` on, in one face, then live ones unless it ends at `until`."""

    def __init__(
        self, broadcasts: Broadcasts, session: SessionRow, start: int, face: Face, until: int | None = None
    ) -> None:
        headers = {
            "cache-control": "no-store, no-transform",
            "x-accel-buffering": "no",
            "x-eve-session-id": session.session_id,
            "x-perdure-tail-index": str(session.events - 1),
            **face.headers,
        }
        super().__init__(broadcasts, session.session_id, headers)
        self._session = session
        self._start = start
        self._face = face
        self._until = until

    async def chunks(self) -> AsyncGenerator[bytes]:
        face, loop = self._face, asyncio.get_running_loop()
        ends_at = None if face.lifetime is None else loop.time() + face.lifetime
        yield face.greeting(self._session)
        async with (
            self._broadcasts.open(self._session) as broadcast,
            contextlib.aclosing(broadcast.chunks(self._start, face, self._until)) as chunks,
        ):
            async for chunk in chunks:
                # Without what a filter leaves out, nothing may be left.
                if chunk:
                    yield chunk
                if ends_at is not None and loop.time() > ends_at:
                    yield face.farewell()
                    return


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. What is left of the body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
