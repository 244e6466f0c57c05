"""Streams that callers create and write: their rows, the requests to them and the outcomes, and the store's interface.

They are apart from the events of sessions, which nobody outside can write. A stream belongs to its owner: paths of
different owners never meet.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from perdure.store.base import Watch

#: The type whose streams have values, and not bytes.
JSON = "application/json"


def media_type(content_type: str) -> str:
    """The type without its parameters, as types are compared."""
    return content_type.partition(";")[0].strip().lower()


@dataclass(frozen=True)
class StreamRow:
    stream_id: str
    owner: str
    path: str
    content_type: str
    # The number of items, which is the position of the next one.
    items: int
    closed: bool = False
    # Seconds without a read or a write after which it expires.
    ttl: int | None = None
    # When it expires whatever happens.
    expires_at: str | None = None
    # It was deleted, or has expired, while forks of it live. Its path is taken until the last of them is gone.
    gone: bool = False


@dataclass(frozen=True)
class Origin:
    """Where a fork begins: a path of the same owner, a position in it, and how far into the append that follows it."""

    path: str
    position: int | None = None
    # Items of a batch of JSON values; bytes of anything else.
    within: int = 0


@dataclass(frozen=True)
class Room:
    """What the streams of one owner may have together. Writes that come at the same time may exceed it by their own."""

    streams: int
    bytes: int


#: What an item counts beside its bytes.
ITEM_BYTES = 100


def room_of(items: Sequence[bytes]) -> int:
    """What the items count."""
    return sum(len(item) + ITEM_BYTES for item in items)


@dataclass(frozen=True)
class NewStream:
    """A stream to create. None as content type: that of the source of a fork, or bytes."""

    stream_id: str
    owner: str
    path: str
    content_type: str | None
    items: Sequence[bytes] = field(default=(), repr=False)
    closed: bool = False
    ttl: int | None = None
    expires_at: str | None = None
    fork: Origin | None = None
    # None: as much as there is.
    room: Room | None = None


@dataclass(frozen=True)
class Created:
    row: StreamRow


@dataclass(frozen=True)
class Existed:
    """There is such a stream already, made by an equal request."""

    row: StreamRow


@dataclass(frozen=True)
class Mismatch:
    """The path is taken by another stream, or the source of the fork has another content type, or was deleted."""

    why: str


@dataclass(frozen=True)
class NoSource:
    """There is no such stream to fork."""


@dataclass(frozen=True)
class OutOfRange:
    """The source of the fork has no such position."""


@dataclass(frozen=True)
class TooManyItems:
    """The fork would copy more than a fork may."""


@dataclass(frozen=True)
class NoRoom:
    """The owner's streams would have more of this than they may."""

    what: Literal["streams", "bytes"]
    limit: int


CreateOutcome: TypeAlias = Created | Existed | Mismatch | NoSource | OutOfRange | TooManyItems | NoRoom


@dataclass(frozen=True)
class Producer:
    """Who writes, so that a repeated request is recognised: each epoch counts its requests from 0."""

    producer_id: str
    epoch: int
    seq: int


@dataclass(frozen=True)
class NewItems:
    """Items to append in one transaction, with the state of their producer and the end of the stream."""

    stream_id: str
    # None: nothing but the end of the stream.
    content_type: str | None
    items: Sequence[bytes] = field(default=(), repr=False)
    close: bool = False
    producer: Producer | None = None
    # Of the writer: each one must be greater than the one before, byte by byte.
    sequence: str | None = None
    room: Room | None = None


@dataclass(frozen=True)
class Appended:
    row: StreamRow


@dataclass(frozen=True)
class Repeated:
    """The producer has sent this before. `seq`: the highest one that was accepted from it."""

    row: StreamRow
    seq: int | None


@dataclass(frozen=True)
class AlreadyClosed:
    row: StreamRow


@dataclass(frozen=True)
class StaleEpoch:
    """A newer epoch of this producer has begun."""

    epoch: int


@dataclass(frozen=True)
class EpochNotFromZero:
    """An epoch begins with 0."""


@dataclass(frozen=True)
class SequenceGap:
    """Requests of this producer are missing before this one."""

    expected: int
    received: int


@dataclass(frozen=True)
class NotInSequence:
    """The writer's sequence is not greater than the one before."""


@dataclass(frozen=True)
class OtherType:
    """The stream has another content type."""


@dataclass(frozen=True)
class NoStream:
    """There is no such stream, or no more."""


@dataclass(frozen=True)
class StreamGone:
    """The stream was deleted, and forks of it live."""


AppendOutcome: TypeAlias = (
    Appended
    | Repeated
    | AlreadyClosed
    | StaleEpoch
    | EpochNotFromZero
    | SequenceGap
    | NotInSequence
    | OtherType
    | NoStream
    | StreamGone
    | NoRoom
)

DeleteOutcome: TypeAlias = StreamRow | NoStream | StreamGone


class StreamStore(Protocol):
    """What the store does with streams. Transient errors of the database are raised as `Unavailable`."""

    async def create(self, stream: NewStream) -> CreateOutcome:
        """Create the stream with its first items, or find the one that an equal request has created."""
        ...

    async def find(self, owner: str, path: str) -> StreamRow | None:
        """The stream at this path, also while it is `gone`."""
        ...

    async def get(self, stream_id: str) -> StreamRow | None:
        """The stream, unless it was deleted or has expired."""
        ...

    async def append(self, new: NewItems) -> AppendOutcome:
        """Append the items, the state of the producer and the end of the stream in one transaction."""
        ...

    async def items(self, stream_id: str, start: int, limit: int, most_bytes: int) -> Sequence[bytes]:
        """Items from this position on: at most `limit`, and not more bytes than this if one item has not more."""
        ...

    async def touch(self, stream_id: str) -> None:
        """A reader was there: begin its time to live again."""

    async def delete(self, owner: str, path: str) -> DeleteOutcome:
        """Delete the stream, or, while forks of it live, its content for others than them."""
        ...

    async def delete_owned(self, owner: str) -> int:
        """Delete all streams of the owner; returns how many."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete about `limit` items and streams that have expired or were deleted; returns how many."""
        ...

    def watch(self, stream_id: str) -> AbstractAsyncContextManager[Watch]: ...
