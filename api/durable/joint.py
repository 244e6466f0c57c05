"""Reads that many want at the same time, made once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Joint(Generic[T]):
    """Makes one call for all who ask for the same while it has not begun.

    A call that has begun may have seen what was before: who asks then gets the next one, which waits for the first.
    """

    def __init__(self) -> None:
        self._begun: dict[Hashable, asyncio.Task[T]] = {}
        self._next: dict[Hashable, asyncio.Task[T]] = {}

    @property
    def begun(self) -> int:
        """How many calls have begun, and not ended."""
        return len(self._begun)

    async def __call__(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> T:
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._run(key, call, self._begun.get(key)))
            # All who have asked may have left when it fails.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Who leaves does not take it from the others.
        return await asyncio.shield(task)

    async def _run(self, key: Hashable, call: Callable[[], Awaitable[T]], before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        task = self._begun[key] = self._next.pop(key)
        try:
            return await call()
        finally:
            if self._begun.get(key) is task:
                del self._begun[key]
