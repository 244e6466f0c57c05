"""Live events for many readers: one follower of the store per watched session, for any number of readers.

The follower encodes each event once and keeps the latest lines. A reader is an index and a face: it takes lines from
the broadcast while it keeps up, and pages from the store when the broadcast no longer has its next line. So a reader
that never reads costs only its own connection.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from perdure.errors import SessionNotFound, Unavailable
from perdure.protocol.events import TERMINAL, Event
from perdure.protocol.stream_policy import SHOWS_ALL, StreamPolicy
from perdure.store.base import Store, Watch
from perdure.store.values import SessionRow

from .buffer import Rings, Unsent
from .faces import Face, Line
from .ndjson import NdjsonLines
from .stalls import Stall, Stalls

log = logging.getLogger("perdure.api.stream")

# The first page size of a reader that is behind; it grows when the events are small.
_FIRST_PAGE = 16
# The page size when the terminal event of an ended session is searched from the tail.
_TAIL = 32


@dataclass(frozen=True)
class Pace:
    """The timing and the limits of broadcasts. Times are in seconds."""

    # An idle stream sends something this often, so that proxies keep the connection, unless its face says how often.
    heartbeat: float = 10.0
    # The same for server-sent events, and how long such a connection lives: five minutes, give or take a fifth, so
    # that a balancer can spread clients over new processes.
    comment: float = 15.0
    lifetime: tuple[float, float] = (240.0, 360.0)
    # A connection that reads nothing for this long is dropped.
    stall: float = 60.0
    # The store wakes the follower; this limits the delay after a lost wake-up.
    recheck: float = 5.0
    retry: float = 0.5
    ring_lines: int = 1024
    ring_bytes: int = 4_194_304
    # The most bytes of all rings together.
    rings_bytes: int = 134_217_728
    page: int = 256
    chunk_bytes: int = 65_536
    # The most bytes that all connections together may buffer for clients that do not read.
    unsent_bytes: int = 67_108_864
    # How many readers that are behind get a page at the same time. It bounds the memory when many reconnect at once.
    # With 4, posts took three times as long meanwhile.
    replays: int = 64
    # Readers are woken in groups of this size; other tasks run between two groups.
    wake: int = 8
    # Waking many readers is costly, so events are published in groups: each reader delays the next group by this.
    rest: float = 0.0001


class BroadcastFailed(Exception):
    """The broadcast has failed; its readers should reconnect."""


class Broadcast:
    """The recent lines of one session, and the readers that wait for the next one."""

    def __init__(
        self,
        store: Store,
        session: SessionRow,
        pace: Pace,
        replays: asyncio.Semaphore,
        policy: StreamPolicy,
        rings: Rings,
        stalls: Stalls | None = None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._session_id = session.session_id
        self._pace = pace
        self._stalls = stalls
        self._replays = replays
        self._rings = rings
        self._ring: deque[Line] = deque()
        self._size = 0
        # The index of the first line in the ring, and of the next line.
        self._base = self._next = session.events
        self._ended = session.status in ("completed", "failed")
        # The row of an ended session also counts events after the terminal one; readers do not get those.
        self._end_known = not self._ended
        self.failed = False
        self._closed = False
        # In the order of their arrival.
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._lines = NdjsonLines(store, session.session_id, policy)
        # By the name of the face: a chunk, and the index of its first line and of the one after it.
        self._shared: dict[str, tuple[int, int, bytes]] = {}
        self._follower: asyncio.Task[None] | None = None
        # Runs from the first reader on whose face shows stalls.
        self._watching: asyncio.Task[None] | None = None
        # What readers should know now: that the turn has no worker.
        self._stall: Stall | None = None
        self.moved_at = asyncio.get_running_loop().time()
        self.readers = 0

    @property
    def session_id(self) -> str:
        return self._session_id

    @property
    def position(self) -> int:
        return self._next

    async def tell(self, stall: Stall | None) -> None:
        """Tell readers of a stall, each once; None: there is none."""
        told, self._stall = self._stall, stall
        if stall is not None and stall != told:
            await self._wake()

    def start(self) -> None:
        if not self._ended:
            self._follower = asyncio.create_task(self._follow(), name=f"broadcast {self._session_id}")

    def stop(self) -> None:
        for task in (self._follower, self._watching):
            if task is not None:
                task.cancel()
        self.empty()
        self._rings.resized(self, 0)

    def empty(self) -> None:
        """Drop all lines: readers that need them page from the store."""
        self._ring.clear()
        self._size, self._base = 0, self._next
        self._shared.clear()

    async def close(self) -> None:
        """End the streams of all readers cleanly."""
        self._closed = True
        self.stop()
        await self._wake()

    async def chunks(self, start: int, face: Face, until: int | None = None) -> AsyncGenerator[bytes]:
        """Lines from `start` on in chunks, and heartbeats while idle; ends at `until` or at the terminal event."""
        if not self._end_known:
            await self._find_end()
        if face.shows_stalls and self._stalls is not None and self._watching is None and not self._ended:
            self._watching = asyncio.create_task(self._stalls.watch(self), name=f"stalls of {self._session_id}")
        index, told = start, None
        while not self._closed and (until is None or index < until):
            if index < self._base:
                async for chunk, reached in self._stored(index, face, until):
                    index = reached
                    yield chunk
            elif index < self._next:
                chunk, index = self._recent(index, face, until)
                # Its readers take an event for the end of a stall.
                told = None
                yield chunk
            elif self._ended:
                return
            elif self.failed:
                raise BroadcastFailed
            elif face.shows_stalls and self._stall not in (None, told):
                told = self._stall
                yield face.stalled(told)
            elif not await self._wait_for_line(face.every or self._pace.heartbeat):
                yield face.heartbeat

    # --- readers --------------------------------------------------------------------------------------------

    async def _stored(self, index: int, face: Face, until: int | None) -> AsyncIterator[tuple[bytes, int]]:
        """Lines up to the ring, from the store."""
        encoder, wanted = NdjsonLines(self._store, self._session_id, self._policy), _FIRST_PAGE
        while index < (end := self._base if until is None else min(until, self._base)) and not self._closed:
            async with self._replays:
                lines, read = await self._page(encoder, index, min(wanted, end - index))
            index += len(lines)
            wanted = min(self._pace.page, 2 * wanted) if len(lines) == read else len(lines)
            chunk = face.encode(lines)
            del lines
            # Only this chunk is kept for a client that may never read it.
            yield chunk, index

    async def _page(self, encoder: NdjsonLines, index: int, wanted: int) -> tuple[Sequence[Line], int]:
        """Lines for a chunk, and the number of events that were read for it."""
        page = await self._store.events(self._session_id, index, min(wanted, self._pace.page))
        if not page:
            # The row counts an event that the log does not contain: waiting for it would loop for ever.
            raise BroadcastFailed
        lines: list[Line] = []
        size = 0
        for event in page:
            lines.append(Line(event.index, self._policy.type(event.type), await encoder.line(event)))
            size += len(lines[-1].json)
            if size >= self._pace.chunk_bytes:
                break
        return lines, len(page)

    async def _find_end(self) -> None:
        """Find the terminal event, to omit later events. Few events follow it, so the search starts at the tail."""
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

    def _recent(self, index: int, face: Face, until: int | None) -> tuple[bytes, int]:
        """Lines of the ring. Readers that keep up need the same lines, so those of one face share one chunk."""
        shared = face.shared if until is None else None
        start, end, chunk = self._shared.get(shared or "", (0, 0, b""))
        if start == index and end > index and (end == self._next or len(chunk) >= self._pace.chunk_bytes):
            return chunk, end
        taken: list[Line] = []
        size, at = 0, index - self._base
        last = len(self._ring) if until is None else min(len(self._ring), until - self._base)
        while at < last and size < self._pace.chunk_bytes:
            taken.append(self._ring[at])
            size += len(taken[-1].json)
            at += 1
        chunk = face.encode(taken)
        if shared is not None:
            self._shared[shared] = (index, index + len(taken), chunk)
        return chunk, index + len(taken)

    async def _wait_for_line(self, within: float) -> bool:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            async with asyncio.timeout(within):
                await woken
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(woken, None)
        return True

    # --- follower -------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            while not self._ended:
                try:
                    async with self._store.watch(self._session_id) as watch:
                        await self._read(watch)
                except Unavailable as error:
                    # Readers keep waiting: the store recovers, or they disconnect.
                    log.warning("the broadcast of %s waits for the store: %s", self._session_id, error)
                    await asyncio.sleep(self._pace.retry)
        except SessionNotFound:
            log.info("session %s was deleted; its streams end", self._session_id)
            self.failed = True
        except Exception:
            log.exception("the broadcast of %s failed", self._session_id)
            self.failed = True
        await self._wake()

    async def _read(self, watch: Watch) -> None:
        was_empty = False
        while not self._ended:
            page = await self._store.events(self._session_id, self._next, self._pace.page)
            await self._publish(page)
            if not page and was_empty and await self._store.session(self._session_id) is None:
                # Another process has deleted the session, and its last event, before this one has read it.
                raise SessionNotFound
            if was_empty := not page:
                await watch.changed(self._pace.recheck)

    async def _publish(self, events: Sequence[Event]) -> None:
        unpublished = 0
        for event in events:
            line = Line(event.index, self._policy.type(event.type), await self._lines.line(event))
            self._add(line)
            unpublished += len(line.json)
            if event.type in TERMINAL:
                # The stream ends here; the log may contain later events.
                self._ended = True
                break
            if unpublished > self._pace.ring_bytes // 4:
                # Wake the readers before the ring drops lines that they have not read.
                await self._wake()
                unpublished = 0
        if unpublished:
            await self._wake()
            await asyncio.sleep(self.readers * self._pace.rest)

    def _add(self, line: Line) -> None:
        self._ring.append(line)
        self._size += len(line.json)
        self._next += 1
        self._stall, self.moved_at = None, asyncio.get_running_loop().time()
        while len(self._ring) > self._pace.ring_lines or (self._size > self._pace.ring_bytes and len(self._ring) > 1):
            self._size -= len(self._ring.popleft().json)
            self._base += 1
        self._rings.resized(self, self._size)

    async def _wake(self) -> None:
        for count in range(1, len(self._waiting) + 1):
            woken = next(iter(self._waiting), None)
            if woken is None:
                return
            del self._waiting[woken]
            if not woken.done():
                woken.set_result(None)
            if count % self._pace.wake == 0:
                await asyncio.sleep(0)


class Broadcasts:
    """The broadcasts of this process; each exists while it has readers."""

    def __init__(
        self, store: Store, pace: Pace | None = None, stalls: Stalls | None = None, policy: StreamPolicy = SHOWS_ALL
    ) -> None:
        """`stalls`: looks whether sessions with readers stall; without it nobody does."""
        self._store = store
        #: What readers of events do not see, in all forms.
        self.policy = policy
        self._stalls = stalls
        self.pace = pace or Pace()
        self.unsent = Unsent(self.pace.unsent_bytes)
        self.replays = asyncio.Semaphore(self.pace.replays)
        self._rings = Rings(self.pace.rings_bytes)
        # How many readers read all of a session, also what is no event.
        self.whole = 0
        # Set when the process stops: those who wait for something end.
        self.closing = asyncio.Event()
        self._broadcasts: dict[str, Broadcast] = {}

    @property
    def watched(self) -> int:
        """How many sessions have readers here."""
        return len(self._broadcasts)

    @property
    def held(self) -> int:
        """The bytes of the recent lines of all of them."""
        return self._rings.size

    @property
    def readers(self) -> int:
        return sum(broadcast.readers for broadcast in self._broadcasts.values())

    @asynccontextmanager
    async def open(self, session: SessionRow) -> AsyncGenerator[Broadcast]:
        broadcast = self._broadcasts.get(session.session_id)
        if broadcast is None or broadcast.failed:
            broadcast = Broadcast(self._store, session, self.pace, self.replays, self.policy, self._rings, self._stalls)
            self._broadcasts[session.session_id] = broadcast
            broadcast.start()
        broadcast.readers += 1
        try:
            yield broadcast
        finally:
            broadcast.readers -= 1
            if not broadcast.readers:
                broadcast.stop()
                if self._broadcasts.get(session.session_id) is broadcast:
                    del self._broadcasts[session.session_id]

    async def close(self) -> None:
        """End all streams, so that the process can stop."""
        self.closing.set()
        for broadcast in list(self._broadcasts.values()):
            await broadcast.close()
