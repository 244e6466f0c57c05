"""Live events for many readers: one follower of the store per watched session, however many watch it.

The follower encodes each event once and keeps the latest lines. A reader is an index: it takes lines from the
feed while it keeps up, and pages from the store when it is behind what the feed still holds. So a reader that
never reads costs its own connection and nobody else anything.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from perdure.errors import Unavailable
from perdure.protocol.events import TERMINAL, Event
from perdure.store.base import Store, Watch
from perdure.store.values import SessionRow

from .buffer import Unsent
from .ndjson import NdjsonLines

log = logging.getLogger("perdure.api.stream")

# How many events a reader that is behind is given first; more if they are small.
_FIRST_PAGE = 16
# How many of its last events are read at a time to find where a finished session ended.
_TAIL = 32


@dataclass(frozen=True)
class Pace:
    """How feeds behave over time and how much they hold."""

    # An idle stream says something this often, so that proxies and people know it lives.
    heartbeat: float = 10.0
    # A connection that takes nothing for this long is dropped.
    stall: float = 60.0
    # The store wakes us; this is how long a lost wake-up could cost.
    recheck: float = 5.0
    retry: float = 0.5
    ring_lines: int = 1024
    ring_bytes: int = 4_194_304
    page: int = 256
    chunk_bytes: int = 65_536
    # What all connections together may hold for clients that do not take it.
    unsent_bytes: int = 67_108_864
    # How many readers that are behind are given lines at the same time: not all that a crowd may ever want is there at
    # once, and a crowd that comes back has caught up soon. With 4, posts took three times as long meanwhile.
    replays: int = 64
    # Readers are woken in groups of this size; between two groups others get their turn.
    wake: int = 8
    # Telling many costs; then events are told in groups. So long does each reader delay the next group.
    rest: float = 0.0001


class FeedBroke(Exception):
    """The feed cannot go on; its readers should come again."""


class Broadcast:
    """The recent lines of one session, and those who wait for the next one."""

    def __init__(self, store: Store, session: SessionRow, pace: Pace, replays: asyncio.Semaphore) -> None:
        self._store = store
        self._session_id = session.session_id
        self._pace = pace
        self._replays = replays
        self._ring: deque[bytes] = deque()
        self._size = 0
        # The index of the first line in the ring, and of the line that will come next.
        self._base = self._next = session.events
        self._over = session.status in ("completed", "failed")
        # The row of a session that is over counts what was written after its end; no reader is given that.
        self._end_known = not self._over
        self._broken = False
        self._closed = False
        # In the order in which they came.
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._lines = NdjsonLines(store, session.session_id)
        self._joined: tuple[int, int, bytes] = (0, 0, b"")
        self._follower: asyncio.Task[None] | None = None
        self.readers = 0

    def start(self) -> None:
        if not self._over:
            self._follower = asyncio.create_task(self._follow(), name=f"feed {self._session_id}")

    def stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    @property
    def usable(self) -> bool:
        return not self._broken

    async def close(self) -> None:
        """Let every reader end, cleanly."""
        self._closed = True
        self.stop()
        await self._wake()

    async def chunks(self, start: int) -> AsyncGenerator[bytes]:
        """Lines from `start` on, some at a time, and a blank one now and then; ends at the terminal event."""
        if not self._end_known:
            await self._find_end()
        index = start
        while not self._closed:
            if index < self._base:
                async for chunk, reached in self._stored(index):
                    index = reached
                    yield chunk
            elif index < self._next:
                chunk, index = self._recent(index)
                yield chunk
            elif self._over:
                return
            elif self._broken:
                raise FeedBroke
            elif not await self._news():
                yield b"\n"

    # --- readers --------------------------------------------------------------------------------------------

    async def _stored(self, index: int) -> AsyncIterator[tuple[bytes, int]]:
        """Lines up to the ring, from the store."""
        lines, wanted = NdjsonLines(self._store, self._session_id), _FIRST_PAGE
        while index < self._base and not self._closed:
            async with self._replays:
                chunk, taken, read = await self._page(lines, index, min(wanted, self._base - index))
            index += taken
            wanted = min(self._pace.page, 2 * wanted) if taken == read else taken
            # Nothing but this is kept for a client that may never take it.
            yield chunk, index

    async def _page(self, lines: NdjsonLines, index: int, wanted: int) -> tuple[bytes, int, int]:
        """A chunk of lines, of how many events it is, and how many were read for it."""
        page = await self._store.events(self._session_id, index, min(wanted, self._pace.page))
        if not page:
            # The row counts an event that the log does not hold: never wait for it in a circle.
            raise FeedBroke
        chunk, taken = bytearray(), 0
        for event in page:
            chunk += await lines.line(event)
            taken += 1
            if len(chunk) >= self._pace.chunk_bytes:
                break
        return bytes(chunk), taken, len(page)

    async def _find_end(self) -> None:
        """Leave out what the log holds after the terminal event: read it from its tail, which is short."""
        end = self._next
        while end > 0:
            start = max(0, end - _TAIL)
            page = await self._store.events(self._session_id, start, end - start)
            terminal = next((event.index for event in page if event.type in TERMINAL), None)
            if terminal is not None:
                self._base = self._next = terminal + 1
                break
            end = start
        self._end_known = True

    def _recent(self, index: int) -> tuple[bytes, int]:
        """Lines of the ring. Readers that keep up ask for the same ones: they share one piece of memory."""
        start, end, chunk = self._joined
        if start == index and end > index and (end == self._next or len(chunk) >= self._pace.chunk_bytes):
            return chunk, end
        taken: list[bytes] = []
        size, at = 0, index - self._base
        while at < len(self._ring) and size < self._pace.chunk_bytes:
            taken.append(self._ring[at])
            size += len(taken[-1])
            at += 1
        chunk = taken[0] if len(taken) == 1 else b"".join(taken)
        self._joined = (index, index + len(taken), chunk)
        return chunk, index + len(taken)

    async def _news(self) -> bool:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[news] = None
        try:
            async with asyncio.timeout(self._pace.heartbeat):
                await news
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(news, None)
        return True

    # --- follower -------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            while not self._over:
                try:
                    async with self._store.watch(self._session_id) as watch:
                        await self._read(watch)
                except Unavailable as error:
                    # Readers wait on; the store comes back or they get tired first.
                    log.warning("the feed of %s waits for the store: %s", self._session_id, error)
                    await asyncio.sleep(self._pace.retry)
        except Exception:
            log.exception("the feed of %s broke", self._session_id)
            self._broken = True
        await self._wake()

    async def _read(self, watch: Watch) -> None:
        while not self._over:
            page = await self._store.events(self._session_id, self._next, self._pace.page)
            await self._tell(page)
            if not page:
                await watch.changed(self._pace.recheck)

    async def _tell(self, events: Sequence[Event]) -> None:
        untold = 0
        for event in events:
            line = await self._lines.line(event)
            self._add(line)
            untold += len(line)
            if event.type in TERMINAL:
                # Whatever follows it in the log, the stream ends here.
                self._over = True
                break
            if untold > self._pace.ring_bytes // 4:
                # Before the ring forgets what nobody has seen.
                await self._wake()
                untold = 0
        if untold:
            await self._wake()
            await asyncio.sleep(self.readers * self._pace.rest)

    def _add(self, line: bytes) -> None:
        self._ring.append(line)
        self._size += len(line)
        self._next += 1
        while len(self._ring) > self._pace.ring_lines or (self._size > self._pace.ring_bytes and len(self._ring) > 1):
            self._size -= len(self._ring.popleft())
            self._base += 1

    async def _wake(self) -> None:
        for count in range(1, len(self._waiting) + 1):
            news = next(iter(self._waiting), None)
            if news is None:
                return
            del self._waiting[news]
            if not news.done():
                news.set_result(None)
            if count % self._pace.wake == 0:
                await asyncio.sleep(0)


class Broadcasts:
    """The feeds of this process; each lives while somebody reads it."""

    def __init__(self, store: Store, pace: Pace | None = None) -> None:
        self._store = store
        self.pace = pace or Pace()
        self.unsent = Unsent(self.pace.unsent_bytes)
        self._replays = asyncio.Semaphore(self.pace.replays)
        self._feeds: dict[str, Broadcast] = {}

    @property
    def watched(self) -> int:
        """How many sessions have readers here."""
        return len(self._feeds)

    @property
    def readers(self) -> int:
        return sum(feed.readers for feed in self._feeds.values())

    @asynccontextmanager
    async def open(self, session: SessionRow) -> AsyncGenerator[Broadcast]:
        feed = self._feeds.get(session.session_id)
        if feed is None or not feed.usable:
            feed = self._feeds[session.session_id] = Broadcast(self._store, session, self.pace, self._replays)
            feed.start()
        feed.readers += 1
        try:
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                feed.stop()
                if self._feeds.get(session.session_id) is feed:
                    del self._feeds[session.session_id]

    async def close(self) -> None:
        """End all streams, so that the process may end."""
        for feed in list(self._feeds.values()):
            await feed.close()
