"""The forms in which readers get a stream. All of them encode the same lines, and share one follower of the store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from api.responses import dumps
from perdure.protocol.events import SESSION_STALLED
from perdure.protocol.stream_policy import EVENT_EXCLUDED
from perdure.protocol.wire import JsonObject
from perdure.runtime.reports.timeline import Entry
from perdure.store.values import SessionRow

from .ndjson import CONTENT_TYPE, FORMAT, VERSION
from .stalls import Stall


@dataclass(frozen=True, slots=True)
class Line:
    """One event: its place, its type, and all that readers see of it as JSON, in one line that ends with a newline."""

    index: int
    type: str
    json: bytes


class Face(Protocol):
    """One form of the stream, as one response has it."""

    @property
    def headers(self) -> dict[str, str]: ...

    #: Readers that want the same bytes for the same lines have the same name; None: no other reader wants them.
    @property
    def shared(self) -> str | None: ...

    #: Sent this often, in seconds, to an idle stream, so that proxies keep the connection.
    @property
    def heartbeat(self) -> bytes: ...

    @property
    def every(self) -> float | None: ...

    #: After so many seconds the stream ends with a farewell, and its reader connects again; None: never.
    @property
    def lifetime(self) -> float | None: ...

    def greeting(self, session: SessionRow) -> bytes:
        """The first bytes. Proxies forward the headers with them."""
        ...

    def encode(self, lines: Sequence[Line]) -> bytes: ...

    def beside(self, entry: Entry) -> bytes:
        """What is in no log: it has no index."""
        ...

    #: Whether its readers are told of stalls. Those of NDJSON see nothing but events.
    @property
    def shows_stalls(self) -> bool: ...

    def stalled(self, stall: Stall) -> bytes: ...

    def farewell(self) -> bytes: ...


@dataclass(frozen=True)
class Ndjson:
    """One line for each event; clients skip blank lines."""

    shared: str | None = "ndjson"
    heartbeat: bytes = b"\n"
    every: float | None = None
    lifetime: float | None = None
    shows_stalls: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {
            "content-type": CONTENT_TYPE,
            "x-eve-stream-format": FORMAT,
            "x-eve-stream-version": VERSION,
        }

    def greeting(self, session: SessionRow) -> bytes:
        return b"\n"

    def encode(self, lines: Sequence[Line]) -> bytes:
        return lines[0].json if len(lines) == 1 else b"".join(line.json for line in lines)

    def beside(self, entry: Entry) -> bytes:
        return dumps({"data": entry.data, "type": entry.type, "meta": {"at": entry.at}}) + b"\n"

    def stalled(self, stall: Stall) -> bytes:
        return b""

    def farewell(self) -> bytes:
        return b""


@dataclass(frozen=True)
class Filter:
    """Which types of events a reader wants: `types` (none: all of them) without `exclude`."""

    types: frozenset[str] = field(default_factory=frozenset[str])
    exclude: frozenset[str] = field(default_factory=frozenset[str])

    def __bool__(self) -> bool:
        return bool(self.types or self.exclude)

    def wants(self, type: str) -> bool:
        return (not self.types or type in self.types) and type not in self.exclude and type != EVENT_EXCLUDED


@dataclass(frozen=True)
class ServerSentEvents:
    """A frame for each event, with its index as the id: what `EventSource` of browsers reads, and resumes by."""

    filter: Filter = field(default_factory=Filter)
    every: float | None = None
    lifetime: float | None = None
    heartbeat: bytes = b": heartbeat\n\n"
    shows_stalls: bool = True

    @property
    def shared(self) -> str | None:
        return None if self.filter else "sse"

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "text/event-stream; charset=utf-8"}

    def greeting(self, session: SessionRow) -> bytes:
        return b"retry: 1000\n" + _frame("connected", {"sessionId": session.session_id, "tail": session.events - 1})

    def encode(self, lines: Sequence[Line]) -> bytes:
        frames = [
            b"id: %d\nevent: %s\ndata: %s\n" % (line.index, line.type.encode(), line.json)
            for line in lines
            if self.filter.wants(line.type)
        ]
        if lines and not self.filter.wants(lines[-1].type):
            # A frame without data is no event, and moves the place from which a client resumes.
            frames.append(b"id: %d\n\n" % lines[-1].index)
        return b"".join(frames)

    def beside(self, entry: Entry) -> bytes:
        if not self.filter.wants(entry.type):
            return b""
        # Without an id, too.
        return _frame(entry.type, {"data": entry.data, "type": entry.type, "meta": {"at": entry.at}})

    def stalled(self, stall: Stall) -> bytes:
        # Without an id: clients keep the index from which they resume.
        return _frame(SESSION_STALLED, stall.shown)

    def farewell(self) -> bytes:
        return b"retry: 100\n" + _frame("disconnecting", {"reason": "connection_cycle", "retryMs": 100})


def _frame(event: str, data: JsonObject) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), dumps(data))
