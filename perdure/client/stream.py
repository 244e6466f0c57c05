"""The events of a session over as many connections as it takes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import UNREACHABLE, ClientError
from .events import TERMINAL, Event
from .transport import Transport, backoff, segment

#: Called with the error when a stream is lost, and with None when it is back.
OnOutage: TypeAlias = Callable[[ClientError | None], None]

#: For a reader a fault of the API is an outage: to read again does no harm.
_FAULT = 500

#: A connection that has lasted so many seconds was a good one, whether or not an event has come.
_GOOD = 5.0
#: The seconds after which a stream is connected again, whatever the API wants.
_LONGEST = 60.0


@dataclass
class Outages:
    """What is known of the connection: whether it is lost, since when, and how often it was tried."""

    report: OnOutage | None
    longest: float | None
    tries: int = 0
    since: float | None = None
    reported: bool = False

    def answered(self) -> None:
        """The API answers. The outage may go on: a connection that opens and breaks at once has not ended it."""
        if self.reported and self.report is not None:
            self.report(None)
        self.reported = False

    def ended(self) -> None:
        """The connection is good: the next outage begins anew."""
        self.tries, self.since = 0, None

    async def wait(self, error: ClientError) -> None:
        """Wait before the next try, or raise the error when it has lasted too long."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        if not self.reported and self.report is not None:
            self.report(error)
        self.reported = True
        pause = max(min(error.retry_after or 0.0, _LONGEST), backoff(self.tries + 1))
        if self.longest is not None and now - self.since + pause > self.longest:
            raise error
        self.tries += 1
        await asyncio.sleep(pause)


async def read_events(
    transport: Transport, prefix: str, session_id: str, start: int, outages: Outages
) -> AsyncGenerator[Event]:
    """The events from an index on, each once, until the last one of the session.

    A connection that ends, breaks or falls silent is made again, behind the last event. Where that is, its index says:
    lines that are no events must not move it.
    """
    cursor, path = start, f"{prefix}/session/{segment(session_id)}/stream"
    while True:
        came, opened = False, time.monotonic()
        try:
            async with _lines(transport, path, cursor) as lines:
                async for line in lines:
                    outages.answered()
                    if time.monotonic() - opened > _GOOD:
                        outages.ended()
                    if not line.strip():
                        continue
                    came = True
                    event = Event.read(line)
                    if event.index is not None:
                        if event.index < cursor:
                            continue
                        cursor = event.index + 1
                        outages.ended()
                    yield event
                    if event.type in TERMINAL:
                        return
            # An API ends the streams when it stops, and that of a session that has ended.
            if not came and await _has_ended(transport, session_id):
                return
            lost = ClientError("The server has ended the stream.", code=UNREACHABLE)
        except ClientError as error:
            if not (error.passing or error.status == _FAULT):
                raise
            lost = error
        await outages.wait(lost)


@asynccontextmanager
async def _lines(transport: Transport, path: str, cursor: int) -> AsyncGenerator[AsyncGenerator[bytes]]:
    params = {"startIndex": cursor} if cursor else {}
    async with transport.lines(path, params) as lines, aclosing(lines):
        yield lines


async def _has_ended(transport: Transport, session_id: str) -> bool:
    try:
        session: Any = await transport.get(f"/v1/sessions/{segment(session_id)}")
    except ClientError as error:
        if error.passing:
            raise
        # An API without this route. A session that is not there any more is refused with its stream.
        return False
    return session["status"] in ("completed", "failed")
