"""What every activity does around its work: say that it lives, number its attempt, translate its errors."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.errors import PerdureError, Structural, TokenConflict
from perdure.store.base import Attempt


def current() -> Attempt:
    """This attempt. A later one was scheduled later, whichever worker runs it."""
    info = activity.info()
    scheduled = info.current_attempt_scheduled_time
    return Attempt(number=info.attempt, generation=int(scheduled.timestamp() * 1_000_000))


@contextlib.asynccontextmanager
async def beating() -> AsyncGenerator[None]:
    """Heartbeat until the work is done; without it the death of this worker goes unnoticed."""
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    beat = asyncio.create_task(_beat(timeout.total_seconds() / 4))
    try:
        yield
    finally:
        beat.cancel()


async def _beat(every: float) -> None:
    while True:
        # The attempt has just begun, which the server knows: most end before there is anything to say.
        await asyncio.sleep(every)
        activity.heartbeat()


@contextlib.contextmanager
def translated() -> Generator[None]:
    """Our errors, as the engine understands them: by type, with or without another try."""
    try:
        yield
    except PerdureError as error:
        structural = isinstance(error, Structural | TokenConflict)
        raise ApplicationError(
            error.message,
            {"details": error.details, "structural": structural},
            type=error.code,
            non_retryable=not _again(error),
            next_retry_delay=_pause(error),
        ) from error


def _again(error: PerdureError) -> bool:
    return bool(getattr(error, "transient", error.retryable))


def _pause(error: PerdureError) -> timedelta | None:
    seconds: float | None = getattr(error, "retry_after", None)
    return None if seconds is None else timedelta(seconds=min(seconds, 300.0))
