"""The subscriptions to sessions in this process, and how new events wake them.

Writes of this process wake them in memory. Writes of other processes arrive through one `Feed`, which runs only while
there are subscriptions.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from perdure.errors import Unavailable

from .base import Watch

#: How many seconds the feed keeps running without subscriptions, because the next reader often comes soon.
LINGER = 1.0


class Feed(Protocol):
    """Notices of new events between processes."""

    async def follow(self, listener: "Watchers") -> None:
        """Report what other processes write, including what they wrote before the first check."""
        ...

    def announce(self, session_id: str, head: int) -> None:
        """Notify other processes that this session has `head` events."""
        ...

    async def close(self) -> None: ...


class Subscription:
    """One watcher: whether there was a change since its last call."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    async def changed(self, within: float | None = None) -> bool:
        try:
            async with asyncio.timeout(within):
                await self._news.wait()
        except TimeoutError:
            return False
        if self._failure is not None:
            raise Unavailable("The store no longer reports new events.") from self._failure
        self._news.clear()
        return True

    def wake(self) -> None:
        self._news.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._news.set()


class Watchers:
    """The watchers of this process: what its feed reports to."""

    def __init__(self, feed: Feed, linger: float = LINGER) -> None:
        self._feed = feed
        self._linger = linger
        self._subscriptions: dict[str, set[Subscription]] = {}
        # The head of each watched session when its watchers were last woken.
        self._heads: dict[str, int] = {}
        self._following: asyncio.Task[None] | None = None
        self._stopping: asyncio.TimerHandle | None = None

    @property
    def following(self) -> bool:
        """Whether the feed runs."""
        return self._following is not None

    @asynccontextmanager
    async def watching(self, session_id: str) -> AsyncGenerator[Watch, None]:
        subscription = Subscription()
        self._subscriptions.setdefault(session_id, set()).add(subscription)
        self._start()
        try:
            yield subscription
        finally:
            remaining = self._subscriptions[session_id]
            remaining.discard(subscription)
            if not remaining:
                del self._subscriptions[session_id]
                self._heads.pop(session_id, None)
            if not self._subscriptions and self._following is not None:
                self._stopping = asyncio.get_running_loop().call_later(self._linger, self._stop)

    def sessions(self) -> Sequence[str]:
        """The ids of the watched sessions."""
        return list(self._subscriptions)

    def advanced(self, session_id: str, head: int) -> None:
        """This session has `head` events now."""
        # A watcher that subscribed after the last wake reads the database afterwards, so it has seen that head.
        if session_id in self._subscriptions and head > self._heads.get(session_id, -1):
            self._heads[session_id] = head
            self.wake(session_id)

    def compare(self, heads: Mapping[str, int]) -> None:
        """These sessions have so many events now. Watched sessions that are not among them were deleted."""
        for session_id, head in heads.items():
            self.advanced(session_id, head)
        for session_id in self.sessions():
            if session_id not in heads:
                self.wake(session_id)

    def wake(self, session_id: str | None = None) -> None:
        """Wake the watchers of one session, or of all: there may be new events."""
        watched = self.sessions() if session_id is None else (session_id,)
        for each in watched:
            for subscription in self._subscriptions.get(each, ()):
                subscription.wake()

    async def close(self) -> None:
        following = self._following
        self._stop()
        if following is not None:
            await asyncio.wait([following])
        await self._feed.close()
        # Nothing wakes them any more: a reader that still waits would wait for ever.
        self._fail(RuntimeError("the store was closed"))

    def _start(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
        if self._following is None:
            self._following = asyncio.create_task(self._feed.follow(self), name="perdure-store-feed")
            self._following.add_done_callback(self._ended)

    def _stop(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
        if self._following is not None:
            self._following.cancel()
            self._following = None

    def _ended(self, following: asyncio.Task[None]) -> None:
        if following is self._following:
            self._following = None
        if following.cancelled() or (failure := following.exception()) is None:
            return
        self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.fail(failure)
