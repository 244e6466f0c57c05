"""Streaming responses, sent as fast as the client reads them; one has what a broadcast has, in one face."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.errors import Unavailable
from perdure.protocol.events import TERMINAL, Event
from perdure.runtime.reports.timeline import Beside, News, merged, of_event
from perdure.store.base import Store
from perdure.store.values import SessionRow
from perdure.telemetry import spans

from .broadcast import Broadcasts
from .buffer import Outflow
from .faces import Face, Line
from .ndjson import NdjsonLines

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


def headers_of(session: SessionRow, face: Face) -> dict[str, str]:
    return {
        "cache-control": "no-store, no-transform",
        "x-accel-buffering": "no",
        "x-eve-session-id": session.session_id,
        "x-perdure-tail-index": str(session.events - 1),
        **face.headers,
    }


class EventStream(LiveResponse):
    """A session's events from `start` on, in one face, then live ones unless it ends at `until`."""

    def __init__(
        self, broadcasts: Broadcasts, session: SessionRow, start: int, face: Face, until: int | None = None
    ) -> None:
        super().__init__(broadcasts, session.session_id, headers_of(session, face))
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


@dataclass
class _Reading:
    """How far a reader of all of a session has come."""

    encoder: NdjsonLines
    news: News
    #: The index of the next event.
    index: int
    ended: bool = False


class WholeStream(LiveResponse):
    """The same, and between the events what happens beside them, which is in no log and has no index.

    Each reads the store for itself, also while nothing is appended. It is for few people who look for something.
    """

    #: The most that one process has at once.
    most = 32
    #: How often it looks for what is no event, in seconds.
    look = 1.0
    #: Events that are read at a time.
    page = 64

    def __init__(
        self,
        broadcasts: Broadcasts,
        store: Store,
        session: SessionRow,
        start: int,
        face: Face,
        until: int | None = None,
    ) -> None:
        if broadcasts.whole >= self.most:
            raise Unavailable("Too many readers of all events; try again later.")
        super().__init__(broadcasts, session.session_id, headers_of(session, face))
        self._store = store
        self._session = session
        self._start = start
        self._face = face
        self._until = until

    async def chunks(self) -> AsyncGenerator[bytes]:
        self._broadcasts.whole += 1
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._broadcasts.whole -= 1

    async def _chunks(self) -> AsyncGenerator[bytes]:
        face, loop = self._face, asyncio.get_running_loop()
        every = face.every or self._broadcasts.pace.heartbeat
        ends_at = None if face.lifetime is None else loop.time() + face.lifetime
        session_id, policy = self._session.session_id, self._broadcasts.policy
        beside = Beside(self._store, session_id, policy)
        reading = _Reading(
            NdjsonLines(self._store, session_id, policy),
            News(beside, await beside.time_after(self._start - 1)),
            self._start,
        )
        yield face.greeting(self._session)
        sent_at = loop.time()
        async with self._store.watch(session_id) as watch:
            while not self._broadcasts.closing.is_set():
                before = reading.index
                chunks = await self._read(reading)
                for chunk in chunks:
                    yield chunk
                    sent_at = loop.time()
                if reading.ended:
                    return
                if ends_at is not None and loop.time() > ends_at:
                    yield face.farewell()
                    return
                if loop.time() - sent_at > every:
                    yield face.heartbeat
                    sent_at = loop.time()
                if reading.index > before:
                    continue
                if not await watch.changed(self.look) and await self._has_ended(reading.index):
                    return

    async def _read(self, reading: "_Reading") -> list[bytes]:
        """What comes next, in order."""
        face, policy = self._face, self._broadcasts.policy
        limit = self.page if self._until is None else min(self.page, self._until - reading.index)
        found = await self._events(reading.index, limit) if limit > 0 else []
        ends = next((number for number, each in enumerate(found, 1) if each.type in TERMINAL), None)
        events = found[:ends]
        # After the events, so that what came with them is there.
        entries = await reading.news.next()
        if entries and ends is None:
            # Before the next event, which may have come meanwhile: what came with it waits for it.
            following = await self._events(reading.index + len(events), 1)
            latest = max((each.at for each in (*events[-1:], *following)), default="")
            entries = [each for each in entries if not following or each.at < latest]
        reading.news.tell(entries)
        lines = {
            each.index: Line(each.index, policy.type(each.type), await reading.encoder.line(each)) for each in events
        }
        reading.index += len(events)
        reading.ended = ends is not None or (self._until is not None and reading.index >= self._until)
        ordered = merged(map(of_event, events), entries)
        return [
            chunk
            for each in ordered
            if (chunk := face.beside(each) if each.index is None else face.encode([lines[each.index]]))
        ]

    async def _events(self, start: int, limit: int) -> list[Event]:
        async with self._broadcasts.replays:
            return list(await self._store.events(self._session.session_id, start, limit))

    async def _has_ended(self, index: int) -> bool:
        row = await self._store.session(self._session.session_id)
        return row is None or (row.ended and index >= row.events)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. What is left of the body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
