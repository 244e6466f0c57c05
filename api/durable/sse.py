"""Server-sent events of the protocol: one with data, one that says where the data ends, and comments."""

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping

from api.responses import dumps
from api.stream.broadcast import Broadcasts
from api.stream.response import LiveResponse

from .offsets import cursor, write_offset

#: What a reader of events takes for the end of a line.
_LINE_END = re.compile(rb"\r\n|\r|\n")


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
