"""Work that is repeated for as long as a process lives, whatever becomes of one time."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable

from perdure.errors import Unavailable

log = logging.getLogger("perdure.sessions")


@contextlib.asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[object]], between: tuple[float, float], *, away: str, failed: str
) -> AsyncGenerator[None]:
    """Do the work now and then while this is open: after a pause between these two, so that not all do it at once.

    `away` and `failed`: what the log says when the store or Temporal cannot be reached, and when the fault is ours.
    """
    task = asyncio.create_task(_repeat(work, between, away, failed))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _repeat(work: Callable[[], Awaitable[object]], between: tuple[float, float], away: str, failed: str) -> None:
    while True:
        await asyncio.sleep(random.uniform(*between))
        try:
            await work()
        except Unavailable as error:
            log.warning("%s: %s", away, error.message)
        except Exception:
            # A fault of ours must not end the work for good.
            log.exception("%s; it will be tried again", failed)
