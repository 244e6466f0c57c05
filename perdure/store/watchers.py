"""Who waits for which session in this process, and how they learn that there is news.

What is written here wakes them in memory. What other processes write comes through a `Feed`, which runs only while
somebody waits, once for all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from perdure.errors import Unavailable

from .base import Watch

#: Readers come and go; the feed outlives a short gap between two of them.
LINGER = 1.0


class Audience(Protocol):
    """The watchers as a feed sees them."""

    def sessions(self) -> Sequence[str]:
        """The sessions that somebody watches."""
        ...

    def told(self, session_id: str, head: int) -> None:
        """The events of this session go up to `head` now."""
        ...

    def compare(self, heads: Mapping[str, int]) -> None:
        """So far the events of these sessions go."""
        ...

    def stir(self, session_id: str | None = None) -> None:
        """There may be news, of one session or of any."""
        ...


class Feed(Protocol):
    """News of other processes, and news for them."""

    async def follow(self, audience: Audience) -> None:
        """Pass on what other processes write, beginning with whatever they wrote before the first look."""
        ...

    def announce(self, session_id: str, head: int) -> None:
        """Let other processes know."""
        ...

    async def close(self) -> None: ...


class Subscription:
    """One watcher's view: whether there was news since it last asked."""

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
            raise Unavailable("The store stopped telling news.") from self._failure
        self._news.clear()
        return True

    def wake(self) -> None:
        self._news.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._news.set()


class Watchers:
    def __init__(self, feed: Feed, linger: float = LINGER) -> None:
        self._feed = feed
        self._linger = linger
        self._subscriptions: dict[str, set[Subscription]] = {}
        # How far each watched session had come when its watchers were last woken.
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
            self._leave(session_id, subscription)

    def sessions(self) -> Sequence[str]:
        return list(self._subscriptions)

    def told(self, session_id: str, head: int) -> None:
        # Whoever subscribed since the last wake reads from the database afterwards, and so sees at least that head.
        if session_id in self._subscriptions and head > self._heads.get(session_id, -1):
            self._heads[session_id] = head
            self.stir(session_id)

    def compare(self, heads: Mapping[str, int]) -> None:
        for session_id, head in heads.items():
            self.told(session_id, head)

    def stir(self, session_id: str | None = None) -> None:
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
        # Nothing wakes them any more: a reader that goes on waiting would wait for ever.
        self._fail(RuntimeError("the store was closed"))

    def _leave(self, session_id: str, subscription: Subscription) -> None:
        remaining = self._subscriptions[session_id]
        remaining.discard(subscription)
        if not remaining:
            del self._subscriptions[session_id]
            self._heads.pop(session_id, None)
        if not self._subscriptions and self._following is not None:
            self._stopping = asyncio.get_running_loop().call_later(self._linger, self._stop)

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
