"""Reading a log of any kind: what is there already, what comes next, and where its end is."""

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol, TypeAlias

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.envelope import SECURITY
from api.responses import dumps
from api.stream.broadcast import Broadcasts
from api.stream.response import LiveResponse, wait_for_disconnect
from perdure.errors import Invalid, NotFound, PerdureError, RunNotFound
from perdure.protocol.stream_policy import StreamPolicy
from perdure.store.base import Watch
from perdure.store.streams import JSON, media_type

from .joint import Joint
from .offsets import START, Offset, cursor, read_offset, write_offset

Live: TypeAlias = Literal["long-poll", "sse"]

_MOST_TAIL = 10**9
_TAIL = re.compile(r"[0-9]{1,12}")

#: What a reader of events takes for the end of a line.
_LINE_END = re.compile(rb"\r\n|\r|\n")


class StreamNotFound(NotFound):
    """There is no such stream."""

    code = "stream_not_found"


class OffsetGone(PerdureError):
    """The offset is beyond the end of the stream."""

    status = 416
    code = "stream_offset_gone"


@dataclass(frozen=True)
class Timing:
    """How long readers wait. Times are in seconds."""

    long_poll: float = 30.0
    # An event stream sends a comment this often, and says this often where it is.
    heartbeat: float = 15.0
    control: float = 30.0
    # An event stream ends after this time, and its client reconnects.
    rotation: float = 60.0
    # The store wakes readers; this limits the delay after a lost wake-up.
    recheck: float = 5.0


@dataclass(frozen=True)
class Head:
    """The end of a log."""

    position: int
    closed: bool = False
    # The first position of the newest log, if the stream continues several.
    first: int = 0


@dataclass(frozen=True)
class Page:
    items: Sequence[bytes]
    # The position after what was read. It may advance without an item.
    end: int


class Source(Protocol):
    """A log that can be read."""

    @property
    def name(self) -> str:
        """For the log of this process."""
        ...

    @property
    def tag(self) -> str:
        """What identifies the log to caches: another log never has the same."""
        ...

    @property
    def content_type(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """More headers of a response that shows the state of the log."""
        ...

    async def head(self) -> Head:
        """The end of the log; a `NotFound` when it is gone."""
        ...

    async def page(self, start: int, head: Head) -> Page:
        """Items from this position on, up to the head: as many as may be in memory."""
        ...

    async def touch(self) -> None:
        """A reader was there."""

    def watch(self) -> AbstractAsyncContextManager[Watch]: ...


@dataclass(frozen=True)
class Reading:
    """What a request wants to read."""

    # As it was asked for; `position` says where that is.
    asked: str
    offset: Offset
    live: Live | None
    cursor: str | None
    tail: int | None

    def position(self, head: Head) -> int:
        """Where to begin; `OffsetGone` when that is beyond the end."""
        if self.offset == "now":
            return head.position
        if self.asked == START:
            return head.first if self.tail is None else max(head.first, head.position - self.tail)
        if self.offset > head.position:
            raise OffsetGone(meta={"offset": self.asked, "nextOffset": write_offset(head.position)})
        return self.offset


def parse_reading(params: QueryParams) -> Reading:
    """What the query asks for. Parameters that are not known are ignored, as the protocol says."""
    asked, live = _single(params, "offset"), _single(params, "live")
    if live is not None and live not in ("long-poll", "sse"):
        raise Invalid("Expected 'live' to be long-poll or sse.")
    if live is not None and asked is None:
        raise Invalid("Expected 'offset' with 'live'.")
    tail = _single(params, "tail")
    if tail is not None and not (_TAIL.fullmatch(tail) and 1 <= int(tail) <= _MOST_TAIL):
        raise Invalid("Expected 'tail' to be a number of events, 1 or more.")
    asked = START if asked is None else asked
    return Reading(asked, read_offset(asked), live, params.get("cursor"), None if tail is None else int(tail))


def _single(params: QueryParams, name: str) -> str | None:
    given = params.getlist(name)
    if len(given) > 1:
        raise Invalid(f"Expected '{name}' once.")
    return given[0] if given else None


class Reader:
    """Serves the reads of all sources."""

    def __init__(self, broadcasts: Broadcasts, timing: Timing) -> None:
        # Whose connections count together with those of all other streams.
        self._broadcasts = broadcasts
        self._timing = timing
        self._pages = Joint[Page]()

    @property
    def policy(self) -> StreamPolicy:
        """What readers of events do not see."""
        return self._broadcasts.policy

    @property
    def closing(self) -> bool:
        """Whether this process stops."""
        return self._broadcasts.closing.is_set()

    async def respond(self, request: Request, source: Source) -> Response:
        """The response to GET or HEAD."""
        if request.method == "HEAD":
            return await self._head(source)
        reading = parse_reading(request.query_params)
        match reading.live:
            case None:
                return await self._catch_up(request, source, reading)
            case "long-poll":
                return await self._long_poll(request, source, reading)
            case "sse":
                head = await source.head()
                await source.touch()
                return self._events(source, reading, reading.position(head))

    async def _head(self, source: Source) -> Response:
        head = await source.head()
        headers = {**source.headers, "etag": _etag(source, START, head.position, closed=head.closed)}
        response = Response(status_code=200, headers=headers_of(source, head.position, head, headers))
        # That of the body that GET would have is not known.
        del response.headers["content-length"]
        return response

    async def _catch_up(self, request: Request, source: Source, reading: Reading) -> Response:
        head = await source.head()
        await source.touch()
        start = reading.position(head)
        if reading.offset == "now":
            return self._page(source, (), start, head, source.headers)
        page = await self._read(source, start, head)
        closed = head.closed and page.end == head.position
        etag = _etag(source, reading.asked, page.end, closed=closed)
        if _matches(request.headers.get("if-none-match"), etag):
            return Response(status_code=304, headers={**SECURITY, "etag": etag})
        return self._page(source, page.items, page.end, head, {**source.headers, "etag": etag})

    async def _long_poll(self, request: Request, source: Source, reading: Reading) -> Response:
        until = monotonic() + self._timing.long_poll
        async with source.watch() as watch, departing(request) as gone:
            head = await source.head()
            await source.touch()
            position = reading.position(head)
            while True:
                page = await self._read(source, position, head)
                position = page.end
                moved = {"stream-cursor": cursor(reading.cursor)}
                if page.items:
                    etag = _etag(source, reading.asked, position, closed=head.closed and position == head.position)
                    return self._page(source, page.items, position, head, {**source.headers, **moved, "etag": etag})
                # Otherwise these were events that are not shown in this form.
                if position == head.position:
                    if head.closed or monotonic() >= until or self.closing:
                        return Response(status_code=204, headers=headers_of(source, position, head, moved, typed=False))
                    await self.change(watch, until - monotonic(), gone)
                head = await source.head()

    async def _read(self, source: Source, position: int, head: Head) -> Page:
        if position >= head.position:
            return Page((), position)

        async def read() -> Page:
            # As many pages are in the making as those of all other streams: many readers may come back at once.
            async with self._broadcasts.replays:
                return await source.page(position, head)

        return await self._pages((source.tag, position, head.position), read)

    def _page(self, source: Source, items: Sequence[bytes], end: int, head: Head, more: Mapping[str, str]) -> Response:
        headers = headers_of(source, end, head, more)
        return PageResponse(self._broadcasts, source.name, headers, body_of(source.content_type, items))

    def _events(self, source: Source, reading: Reading, start: int) -> Response:
        headers = {
            "cache-control": "no-cache, no-transform",
            "content-type": "text/event-stream",
            "x-accel-buffering": "no",
            **SECURITY,
        }
        if not _is_text(source.content_type):
            headers["stream-sse-data-encoding"] = "base64"
        frames = self._frames(source, reading, start)
        return ServerSentEvents(self._broadcasts, source.name, headers, frames)

    async def _frames(self, source: Source, reading: Reading, position: int) -> AsyncGenerator[bytes]:
        """The frames from a position on. One of data always comes together with one that says where it ends."""
        timing, until = self._timing, monotonic() + self._timing.rotation
        said_at, sent_at = -timing.control, monotonic()
        # A log that is deleted meanwhile ends the stream: the client reconnects, and is told.
        with contextlib.suppress(StreamNotFound, RunNotFound):
            async with source.watch() as watch:
                while monotonic() < until and not self.closing:
                    head = await source.head()
                    page = await self._read(source, position, head)
                    if page.end > position:
                        await source.touch()
                    position = page.end
                    at_head = position == head.position
                    ended = head.closed and at_head
                    if page.items or ended or monotonic() - said_at >= timing.control:
                        said_at = sent_at = monotonic()
                        control = control_event(position, reading.cursor, ended, up_to_date=at_head)
                        yield _data(source, page.items) + control
                    elif monotonic() - sent_at >= timing.heartbeat:
                        sent_at = monotonic()
                        await source.touch()
                        yield heartbeat()
                    if ended:
                        return
                    if at_head:
                        await self.change(watch, until - monotonic())

    async def change(self, watch: Watch, within: float, gone: asyncio.Task[None] | None = None) -> None:
        """Wait until the log may have changed, this process stops, or it is time to look anyway.

        `ClientDisconnect` when `gone` says that nobody waits for the answer any more.
        """
        timing = self._timing
        within = max(0.0, min(within, timing.recheck, timing.heartbeat))
        changed = asyncio.ensure_future(watch.changed(within))
        closing = asyncio.ensure_future(self._broadcasts.closing.wait())
        waiting = (changed, closing) if gone is None else (changed, closing, gone)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if gone is not None and gone.done():
                raise ClientDisconnect
            if changed.done():
                changed.result()
        finally:
            for each in (changed, closing):
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(changed, closing, return_exceptions=True)


@contextlib.asynccontextmanager
async def departing(request: Request) -> AsyncGenerator[asyncio.Task[None]]:
    """Ends when the client has gone. Otherwise those who ask and leave would have many waiting here for nobody."""
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        yield gone
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(gone, return_exceptions=True)


def headers_of(
    source: Source, end: int, head: Head, more: Mapping[str, str], *, typed: bool = True
) -> Mapping[str, str]:
    """The headers of a response that ends at a position."""
    headers = {"stream-next-offset": write_offset(end), "cache-control": "no-store", **SECURITY, **more}
    if typed:
        headers["content-type"] = source.content_type
    if end == head.position:
        headers["stream-up-to-date"] = "true"
        if head.closed:
            headers["stream-closed"] = "true"
    return headers


class PageResponse(LiveResponse):
    """A page. Large ones are counted while they are sent, as all that waits for clients that do not read."""

    def __init__(self, broadcasts: Broadcasts, name: str, headers: Mapping[str, str], page: bytes) -> None:
        super().__init__(broadcasts, name, headers)
        self.headers["content-length"] = str(len(page))
        self._page = page

    async def chunks(self) -> AsyncGenerator[bytes]:
        if self._page:
            yield self._page


def body_of(content_type: str, items: Sequence[bytes]) -> bytes:
    """The items as a body: an array of JSON values, or all bytes."""
    return b"[" + b",".join(items) + b"]" if media_type(content_type) == JSON else b"".join(items)


def _data(source: Source, items: Sequence[bytes]) -> bytes:
    if not items:
        return b""
    body = body_of(source.content_type, items)
    return data_event(body if _is_text(source.content_type) else base64.b64encode(body))


def _is_text(content_type: str) -> bool:
    kind = media_type(content_type)
    return kind == JSON or kind.startswith("text/")


def _etag(source: Source, asked: str, end: int, *, closed: bool) -> str:
    tag = base64.b64encode(source.tag.encode()).decode()
    return f'"{tag}:{asked}:{write_offset(end)}{":c" if closed else ""}"'


def _matches(given: str | None, etag: str) -> bool:
    # A proxy that compresses makes the tag a weak one.
    tags = () if given is None else (each.strip().removeprefix("W/") for each in given.split(","))
    return any(tag in ("*", etag) for tag in tags)


# --- server-sent events -------------------------------------------------------------------------------------


class ServerSentEvents(LiveResponse):
    """Frames as they are made. Each is one chunk, so that a client never has data without its position."""

    def __init__(
        self, broadcasts: Broadcasts, name: str, headers: Mapping[str, str], frames: AsyncGenerator[bytes]
    ) -> None:
        super().__init__(broadcasts, name, headers)
        self._frames = frames

    async def chunks(self) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(self._frames) as frames:
            async for frame in frames:
                yield frame


def data_event(payload: bytes) -> bytes:
    """The payload in as many lines as it has; a line break in it must not end the event."""
    # A reader drops one space after the colon, so a line that begins with a space gets another one.
    lines = (b" " + line if line.startswith(b" ") else line for line in _LINE_END.split(payload))
    return b"event: data\n" + b"".join(b"data:" + line + b"\n" for line in lines) + b"\n"


def control_event(position: int, cursor_of_client: str | None, closed: bool, *, up_to_date: bool) -> bytes:
    control: dict[str, str | bool] = {"streamNextOffset": write_offset(position)}
    if closed:
        control["streamClosed"] = True
    else:
        control["streamCursor"] = cursor(cursor_of_client)
        if up_to_date:
            control["upToDate"] = True
    return b"event: control\ndata:" + dumps(control) + b"\n\n"


def heartbeat() -> bytes:
    return b": heartbeat\n\n"
