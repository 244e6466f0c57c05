"""Streams that callers create, write and read at paths of their own, as the Durable Streams protocol says."""

import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader
from api.durable.joint import Joint
from api.durable.offsets import read_offset, write_offset
from api.durable.read import Head, Page, Reader, StreamNotFound
from api.envelope import SECURITY, refusal
from api.requests import own_url
from perdure.errors import Conflict, Forbidden, Invalid, PerdureError, TooLarge
from perdure.runtime.deliveries import ulid
from perdure.runtime.streams.written import items_of
from perdure.store.base import Watch
from perdure.store.engine.rows import stamp
from perdure.store.streams import (
    JSON,
    AlreadyClosed,
    Appended,
    Created,
    EpochNotFromZero,
    Existed,
    Mismatch,
    NewItems,
    NewStream,
    NoRoom,
    NoSource,
    NoStream,
    NotInSequence,
    Origin,
    OtherType,
    OutOfRange,
    Producer,
    Repeated,
    Room,
    SequenceGap,
    StaleEpoch,
    StreamGone,
    StreamRow,
    StreamStore,
    TooManyItems,
    media_type,
)

PREFIX = "/v1/stream/"

#: The largest body of an append, in bytes: a page of items has at least one.
MOST_APPENDED = 8_388_608
#: The most items of an append: one transaction writes them, and nothing else is written meanwhile.
MOST_ITEMS = 10_000

_LONGEST_PATH = 1_000
_LONGEST_TYPE = 255
_LONGEST_NAME = 255
_LARGEST = 2**53 - 1
#: A hundred years: a time that is much later cannot be written.
_LONGEST_TTL = 3_153_600_000
_BYTES = "application/octet-stream"

_WHOLE = re.compile(r"0|[1-9][0-9]{0,15}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})")

#: The items of a page: at most so many, and so many bytes unless one has more.
_PAGE_ITEMS = 1_000
_PAGE_BYTES = 1_048_576

_WRITES = ("content-type", "stream-seq", "stream-ttl", "stream-expires-at", "stream-closed", "stream-forked-from")
_FORKS = ("stream-fork-offset", "stream-fork-sub-offset")
_PRODUCERS = ("producer-id", "producer-epoch", "producer-seq")
_SHOWN = (
    *("stream-next-offset", "stream-cursor", "stream-up-to-date", "stream-closed", "stream-ttl", "stream-expires-at"),
    *("stream-sse-data-encoding", "producer-epoch", "producer-seq", "producer-expected-seq", "producer-received-seq"),
    *("etag", "location", "content-type"),
)
#: A page of any origin may ask. Without credentials of its own, nobody but a development server answers it.
CORS = {"access-control-allow-origin": "*", "access-control-expose-headers": ", ".join(_SHOWN)}
#: What was written is shown by no browser as a page of this API: it would act for whoever is signed in here.
HEADERS = {**CORS, "content-security-policy": "sandbox; default-src 'none'"}
_PREFLIGHT = {
    **CORS,
    "access-control-allow-methods": "GET, HEAD, PUT, POST, DELETE, OPTIONS",
    "access-control-allow-headers": ", ".join(
        (*_WRITES, *_FORKS, *_PRODUCERS, "authorization", "x-api-key", "if-none-match", "last-event-id")
    ),
    "access-control-max-age": "86400",
}


class Gone(PerdureError):
    """The stream was deleted."""

    status = 410
    code = "stream_gone"


class QuotaReached(PerdureError):
    """The streams of the caller have as much as they may have."""

    status = 413
    code = "quota_reached"


class WrittenStream:
    """A stream as a source of reads."""

    content_type: str

    def __init__(self, store: StreamStore, row: StreamRow, rows: Joint[StreamRow | None] | None = None) -> None:
        """`rows`: what many readers of one stream share, so that its head is read once for all of them."""
        self._store = store
        self._row = row
        self._rows = rows or Joint[StreamRow | None]()
        self.content_type = row.content_type

    @property
    def name(self) -> str:
        return self._row.stream_id

    @property
    def tag(self) -> str:
        return f"{self._row.path}:{self._row.stream_id}"

    @property
    def headers(self) -> Mapping[str, str]:
        ttl = {} if self._row.ttl is None else {"stream-ttl": str(self._row.ttl)}
        expires_at = {} if self._row.expires_at is None else {"stream-expires-at": self._row.expires_at}
        return {**ttl, **expires_at}

    async def head(self) -> Head:
        stream_id = self._row.stream_id
        row = await self._rows(stream_id, lambda: self._store.get(stream_id))
        if row is None:
            raise StreamNotFound
        return Head(row.items, row.closed)

    async def page(self, start: int, head: Head) -> Page:
        limit = min(_PAGE_ITEMS, head.position - start)
        items = await self._store.items(self._row.stream_id, start, limit, _PAGE_BYTES) if limit > 0 else ()
        return Page(items, start + len(items))

    async def touch(self) -> None:
        if self._row.ttl is not None:
            await self._store.touch(self._row.stream_id)

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        return self._store.watch(self._row.stream_id)


class StreamRoutes:
    METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")

    def __init__(self, gate: Gate, store: StreamStore, reader: Reader, bodies: BodyReader, room: Room) -> None:
        self._gate = gate
        self._room = room
        self._store = store
        self._reader = reader
        self._bodies = bodies
        self._rows = Joint[StreamRow | None]()

    async def preflight(self, request: Request) -> Response:
        """What a page of another origin may ask for. It says nothing of any stream, so anybody may ask."""
        return Response(status_code=204, headers={**_PREFLIGHT, **SECURITY})

    async def read(self, request: Request) -> Response:
        owner = await self._owner(request)
        row = await self._find(owner, _path(request))
        return await self._reader.respond(request, WrittenStream(self._store, row, self._rows))

    async def create(self, request: Request) -> Response:
        """Create a stream, or find the one that an equal request has created."""
        owner = await self._owner(request)
        path, given = _path(request), request.headers
        fork = _origin(given)
        content_type = _content_type(given.get("content-type"))
        if content_type is None and fork is None:
            content_type = _BYTES
        ttl, expires_at = _time_to_live(given)
        # The items of a fork without a type have that of its source.
        kind = content_type
        if kind is None and fork is not None:
            source = await self._store.find(owner, fork.path)
            kind = _BYTES if source is None else source.content_type
        assert kind is not None
        items = await self._items(request, kind)
        outcome = await self._store.create(
            NewStream(
                stream_id=f"str_{ulid()}",
                owner=owner,
                path=path,
                content_type=content_type,
                items=items,
                closed=_closes(given),
                ttl=ttl,
                expires_at=expires_at,
                fork=fork,
                room=self._room,
            )
        )
        match outcome:
            case Created(row):
                return _state(row, 201, {"location": own_url(request)})
            case Existed(row):
                return _state(row, 200)
            case Mismatch(why):
                raise Conflict(why)
            case NoSource():
                raise StreamNotFound("There is no such stream to fork.")
            case OutOfRange():
                raise Invalid("The source of the fork has no such position.")
            case TooManyItems():
                raise TooLarge("A fork copies at most 100,000 items, and 64 MiB.")
            case NoRoom() as full:
                raise _unable(full)

    async def append(self, request: Request) -> Response:
        """Append to the stream, close it, or both."""
        owner = await self._owner(request)
        row = await self._find(owner, _path(request))
        given = request.headers
        producer, closes = _producer(given), _closes(given)
        content_type = _content_type(given.get("content-type"))
        # Of another type nothing is parsed: it is refused for its type.
        matches = content_type is not None and media_type(content_type) == media_type(row.content_type)
        items = await self._items(request, row.content_type if matches else _BYTES, empty=False)
        if not items and not closes:
            raise Invalid("Expected a body that is not empty.")
        if items and content_type is None:
            raise Invalid("Expected the Content-Type header.")
        new = NewItems(
            stream_id=row.stream_id,
            content_type=content_type if items else None,
            items=items,
            close=closes,
            producer=producer,
            sequence=_name(given, "stream-seq"),
            room=self._room,
        )
        return await self._appended(new)

    async def _appended(self, new: NewItems) -> Response:
        producer = new.producer
        echo = {} if producer is None else {"producer-epoch": str(producer.epoch), "producer-seq": str(producer.seq)}
        match await self._store.append(new):
            case Appended(row):
                return _state(row, 200 if producer is not None and new.items else 204, echo)
            case Repeated(row, seq):
                if seq is not None:
                    echo["producer-seq"] = str(seq)
                return _state(row, 204, echo)
            case AlreadyClosed(row):
                headers = {"stream-closed": "true", "stream-next-offset": write_offset(row.items)}
                return _refused(Conflict("The stream is closed."), headers)
            case StaleEpoch(epoch):
                headers = {"producer-epoch": str(epoch)}
                return _refused(Forbidden("A newer epoch of this producer has begun."), headers)
            case SequenceGap(expected, received):
                headers = {"producer-expected-seq": str(expected), "producer-received-seq": str(received)}
                return _refused(Conflict("Requests of this producer are missing before this one."), headers)
            case EpochNotFromZero():
                raise Invalid("Expected 'Producer-Seq' to be 0 in a new epoch.")
            case NotInSequence():
                raise Conflict("Expected 'Stream-Seq' to be greater than the one before.")
            case OtherType():
                raise Conflict("The stream has another content type.")
            case NoStream() | StreamGone() | NoRoom() as unable:
                raise _unable(unable)

    async def delete(self, request: Request) -> Response:
        """Delete the stream. While forks of it live, its path stays taken."""
        owner = await self._owner(request)
        match await self._store.delete(owner, _path(request)):
            case StreamRow():
                return Response(status_code=204, headers={**SECURITY, **CORS})
            case NoStream():
                raise StreamNotFound
            case StreamGone():
                raise Gone

    async def _owner(self, request: Request) -> str:
        return (await self._gate.admit(request)).owner

    async def _find(self, owner: str, path: str) -> StreamRow:
        row = await self._store.find(owner, path)
        if row is None:
            raise StreamNotFound
        if row.gone:
            raise Gone
        return row

    async def _items(self, request: Request, content_type: str, *, empty: bool = True) -> tuple[bytes, ...]:
        """The items of the body. Without `empty`, an array of nothing is refused."""

        def parse(body: bytes) -> tuple[bytes, ...]:
            items = items_of(content_type, body)
            if len(items) > MOST_ITEMS:
                raise TooLarge(f"A body has at most {MOST_ITEMS} items.")
            if not items and body.strip() and not empty:
                raise Invalid("Expected an array that is not empty.")
            return items

        return await self._bodies.read_raw(request, parse, counted=media_type(content_type) == JSON)


def _state(row: StreamRow, status: int, more: Mapping[str, str] | None = None) -> Response:
    """The response to a write: the state of the stream after it."""
    headers = {"stream-next-offset": write_offset(row.items), "cache-control": "no-store", **SECURITY, **(more or {})}
    if row.closed:
        headers["stream-closed"] = "true"
    response = Response(status_code=status, headers=headers)
    if status != 204:
        response.headers["content-type"] = row.content_type
    return response


def _unable(outcome: NoStream | StreamGone | NoRoom) -> PerdureError:
    match outcome:
        case NoStream():
            return StreamNotFound()
        case StreamGone():
            return Gone()
        case NoRoom(what, limit):
            size = f"are at most {limit}" if what == "streams" else f"have at most {limit} bytes"
            return QuotaReached(f"All streams of one caller {size}: delete some, or let them expire.")


def _refused(error: PerdureError, headers: Mapping[str, str]) -> Response:
    return refusal(error, headers)


def _path(request: Request) -> str:
    path: str = request.path_params["path"]
    if 0 < len(path) <= _LONGEST_PATH and path.isascii() and path.isprintable():
        return path
    if request.method == "PUT":
        raise Invalid(f"Expected a path of 1 to {_LONGEST_PATH} printable ASCII characters.")
    raise StreamNotFound


def _content_type(given: str | None) -> str | None:
    if given is None or not given.strip():
        return None
    if len(given) > _LONGEST_TYPE or not given.isprintable() or not media_type(given):
        raise Invalid("Expected 'Content-Type' to be a media type.")
    return given.strip()


def _closes(given: Mapping[str, str]) -> bool:
    return given.get("stream-closed", "").lower() == "true"


def _whole(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if _WHOLE.fullmatch(text) is None or int(text) > _LARGEST:
        raise Invalid(f"Expected '{name}' to be a whole number, without a sign or leading zeros.")
    return int(text)


def _name(given: Mapping[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and not (0 < len(text) <= _LONGEST_NAME and text.isprintable()):
        raise Invalid(f"Expected '{name}' to have 1 to {_LONGEST_NAME} printable characters.")
    return text


def _time_to_live(given: Mapping[str, str]) -> tuple[int | None, str | None]:
    """Seconds, or a time in the form in which the store compares times."""
    ttl, text = _whole(given, "stream-ttl"), given.get("stream-expires-at")
    if ttl is not None and ttl > _LONGEST_TTL:
        raise Invalid(f"Expected 'Stream-TTL' to be at most {_LONGEST_TTL} seconds.")
    if text is None:
        return ttl, None
    if ttl is not None:
        raise Invalid("Expected 'Stream-TTL' or 'Stream-Expires-At', not both.")
    if _TIME.fullmatch(text) is None:
        raise Invalid("Expected 'Stream-Expires-At' to be a time as in RFC 3339.")
    try:
        return None, stamp(datetime.fromisoformat(text.upper()).astimezone(UTC))
    except (ValueError, OverflowError):
        raise Invalid("Expected 'Stream-Expires-At' to be a time as in RFC 3339.") from None


def _producer(given: Mapping[str, str]) -> Producer | None:
    present = [name for name in _PRODUCERS if name in given]
    if not present:
        return None
    name = _name(given, "producer-id")
    epoch, seq = _whole(given, "producer-epoch"), _whole(given, "producer-seq")
    if name is None or epoch is None or seq is None:
        raise Invalid("Expected 'Producer-Id', 'Producer-Epoch' and 'Producer-Seq' together.")
    return Producer(name, epoch, seq)


def _origin(given: Mapping[str, str]) -> Origin | None:
    """Where a fork begins; None when none is asked for."""
    source, within = given.get("stream-forked-from"), _whole(given, "stream-fork-sub-offset")
    if source is None:
        if within is not None or "stream-fork-offset" in given:
            raise Invalid("Expected 'Stream-Forked-From' with the offset of a fork.")
        return None
    try:
        path = unquote(urlsplit(source).path)
    except ValueError:
        path = ""
    if not path.startswith(PREFIX) or len(path) > _LONGEST_PATH + len(PREFIX) or not path.isprintable():
        raise StreamNotFound("There is no such stream to fork.")
    text = given.get("stream-fork-offset")
    position = None if text is None else read_offset(text)
    if position == "now":
        position = None
    if within and position is None:
        raise Invalid("Expected 'Stream-Fork-Offset' with 'Stream-Fork-Sub-Offset'.")
    return Origin(path.removeprefix(PREFIX), position, within or 0)
