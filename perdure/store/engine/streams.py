"""Streams that callers write: one transaction for the items, the state of the producer and the end of the stream.

A fork is a copy. Its source may be deleted; then only its path stays taken until the last fork is gone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime

from perdure.store.base import Watch
from perdure.store.streams import (
    ITEM_BYTES,
    JSON,
    AlreadyClosed,
    Appended,
    AppendOutcome,
    Created,
    CreateOutcome,
    DeleteOutcome,
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
    TooManyItems,
    media_type,
    room_of,
)
from perdure.store.watchers import Feed, Watchers

from .database import Database, Row, Transaction
from .rows import decode, encode, stamp_after

#: The most items of a fork, and their most bytes, which one transaction copies: nothing else is written meanwhile.
MOST_COPIED = 100_000
MOST_COPIED_BYTES = 67_108_864
#: How many streams of an owner are found at a time to be deleted.
_PAGE = 200
#: A reader begins a time to live again only after this share of it: each time is a write.
_USED = 0.1


class SqlStreams:
    """`StreamStore` over one database; readers are woken as those of events are."""

    def __init__(self, database: Database, watchers: Watchers, feed: Feed, clock: Callable[[], str]) -> None:
        self._database = database
        self._watchers = watchers
        self._feed = feed
        self._now = clock

    async def create(self, stream: NewStream) -> CreateOutcome:
        outcome, ended = await self._database.write(lambda tx: _create(tx, stream, self._now()))
        self._wake(ended)
        return outcome

    async def find(self, owner: str, path: str) -> StreamRow | None:
        async def work(tx: Transaction) -> StreamRow | None:
            found = await tx.row("stream_at", owner=owner, path=path)
            if found is None or not _is_over(found, self._now()):
                return None if found is None else _stream(found)
            # A sweep may not have been there yet.
            kept = await tx.row("has_forks", stream_id=found["stream_id"])
            return None if kept is None else _stream(found, gone=True)

        return await self._database.read(work)

    async def get(self, stream_id: str) -> StreamRow | None:
        found = await self._database.read(lambda tx: tx.row("stream", stream_id=stream_id))
        return None if found is None or _is_over(found, self._now()) else _stream(found)

    async def append(self, new: NewItems) -> AppendOutcome:
        try:
            outcome = await self._database.write(lambda tx: _append(tx, new, self._now()))
        except BaseException:
            # The transaction may have committed all the same. A needless wake costs one read.
            self._watchers.wake(new.stream_id)
            raise
        if isinstance(outcome, tuple):
            row, version = outcome
            self._watchers.advanced(new.stream_id, version)
            self._feed.announce(new.stream_id, version)
            return Appended(row)
        return outcome

    async def items(self, stream_id: str, start: int, limit: int, most_bytes: int) -> Sequence[bytes]:
        async def work(tx: Transaction) -> Sequence[bytes]:
            # The sizes first, so that a page of large items is not read to be dropped.
            sizes = await tx.rows("item_sizes", stream_id=stream_id, start=start, limit=limit)
            until, size = start, 0
            for each in sizes:
                size += each["size"]
                if until > start and size > most_bytes:
                    break
                until = each["idx"] + 1
            found = await tx.rows("items", stream_id=stream_id, start=start, until=until)
            return [bytes(row["data"]) for row in found]

        return await self._database.read(work)

    async def touch(self, stream_id: str) -> None:
        now = self._now()
        found = await self._database.read(lambda tx: tx.row("stream", stream_id=stream_id))
        if found is None or found["ttl"] is None or found["due_at"] is None:
            return
        due_at = stamp_after(now, found["ttl"])
        if _seconds(found["due_at"], due_at) >= _USED * found["ttl"]:
            values = {"stream_id": stream_id, "due_at": due_at, "now": now}
            await self._database.write(lambda tx: tx.run("touch_stream", **values))

    async def delete(self, owner: str, path: str) -> DeleteOutcome:
        async def work(tx: Transaction) -> tuple[DeleteOutcome, Sequence[str]]:
            found = await tx.row("stream_at", owner=owner, path=path)
            found = None if found is None else await tx.row("lock_stream", stream_id=found["stream_id"])
            if found is None or found["path"] is None:
                return NoStream(), ()
            was_over, ended = _is_over(found, self._now()), await _end(tx, found, self._now())
            if not was_over:
                return _stream(found), ended
            kept = await tx.row("has_forks", stream_id=found["stream_id"])
            return (NoStream() if kept is None else StreamGone()), ended

        outcome, ended = await self._database.write(work)
        self._wake(ended)
        return outcome

    async def delete_owned(self, owner: str) -> int:
        deleted = 0
        while found := await self._database.read(lambda tx: tx.rows("streams_of_owner", owner=owner, limit=_PAGE)):
            for row in found:
                await self.delete(owner, row["path"])
            deleted += len(found)
        return deleted

    async def sweep(self, limit: int) -> int:
        now = self._now()
        due = await self._database.read(lambda tx: tx.rows("streams_due", now=now, limit=limit))
        for row in due:
            self._wake(await self._database.write(lambda tx, id=row["stream_id"]: _expire(tx, id, now)))
        dead = await self._database.read(lambda tx: tx.rows("streams_to_purge", limit=limit))
        deleted = len(due)
        for row in dead:
            # A transaction for each: a large stream must not hold the lock of the database for long.
            deleted += await self._database.write(lambda tx, id=row["stream_id"]: _purge(tx, id, limit))
            if deleted >= limit:
                break
        return deleted

    def watch(self, stream_id: str) -> AbstractAsyncContextManager[Watch]:
        return self._watchers.watching(stream_id)

    def _wake(self, stream_ids: Sequence[str]) -> None:
        for each in stream_ids:
            self._watchers.wake(each)
            # More than any version: a process that watches reads that the stream is gone.
            self._feed.announce(each, 2**62)


# --- create -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """What a fork begins with."""

    row: Row | None = None
    # The items before this position are copied, and after them comes `rest`.
    until: int = 0
    rest: tuple[bytes, ...] = ()
    # What the copied items count.
    room: int = 0


async def _create(tx: Transaction, stream: NewStream, now: str) -> tuple[CreateOutcome, Sequence[str]]:
    """The outcome, and the streams that have ended because of it."""
    taken = await tx.row("stream_at", owner=stream.owner, path=stream.path)
    ended: Sequence[str] = ()
    if taken is not None and _is_over(taken, now):
        ended = await _end(tx, taken, now)
        taken = await tx.row("stream_at", owner=stream.owner, path=stream.path)
    if taken is not None:
        return _compared(taken, stream, now), ended
    source = _Source() if stream.fork is None else await _source(tx, stream, stream.fork, now)
    if isinstance(source, _Source) and source.row is not None:
        source = await _measured(tx, source, source.row)
    if not isinstance(source, _Source):
        return source, ended
    added = source.room + room_of(source.rest) + room_of(stream.items)
    if (full := await _room(tx, stream.owner, stream.room, added, streams=1)) is not None:
        return full, ended
    created = await _insert(tx, stream, source, added, now)
    if created is None:
        # Another request was faster.
        taken = await tx.row("stream_at", owner=stream.owner, path=stream.path)
        return (Mismatch("The path is in use.") if taken is None else _compared(taken, stream, now)), ended
    return Created(created), ended


def _compared(taken: Row, stream: NewStream, now: str) -> CreateOutcome:
    if _is_over(taken, now):
        return Mismatch("The stream was deleted, and forks of it live.")
    same_type = stream.content_type is None or media_type(stream.content_type) == media_type(taken["content_type"])
    if not same_type or taken["request"] != _request(stream):
        return Mismatch("The path is in use by a stream that was asked for in another way.")
    return Existed(_stream(taken))


def _request(stream: NewStream) -> str:
    """What was asked for, apart from the content type: a repetition asks for the same."""
    fork = stream.fork
    return encode(
        {
            "closed": stream.closed,
            "ttl": stream.ttl,
            "expiresAt": stream.expires_at,
            "fork": None if fork is None else [fork.path, fork.position, fork.within],
        }
    )


async def _source(
    tx: Transaction, stream: NewStream, fork: Origin, now: str
) -> _Source | Mismatch | NoSource | OutOfRange | TooManyItems:
    found = await tx.row("stream_at", owner=stream.owner, path=fork.path)
    # Locked, so that it is not deleted before the fork keeps its path.
    row = None if found is None else await tx.row("lock_stream", stream_id=found["stream_id"])
    if row is None or row["path"] is None:
        return NoSource()
    if _is_over(row, now):
        return Mismatch("The source of the fork was deleted.") if row["deleted_at"] is not None else NoSource()
    if stream.content_type is not None and media_type(stream.content_type) != media_type(row["content_type"]):
        return Mismatch("A fork has the content type of its source.")
    position = row["next_index"] if fork.position is None else fork.position
    if position > row["next_index"]:
        return OutOfRange()
    if fork.within == 0:
        return _Source(row, position)
    return await _within(tx, row, position, fork.within) or OutOfRange()


async def _measured(tx: Transaction, source: _Source, row: Row) -> _Source | TooManyItems:
    """The source with what its copied items count, unless one transaction cannot copy so much."""
    if source.until > MOST_COPIED:
        return TooManyItems()
    found = await tx.row("bytes_before", stream_id=row["stream_id"], until=source.until)
    assert found is not None
    if found["bytes"] > MOST_COPIED_BYTES:
        return TooManyItems()
    return replace(source, room=int(found["bytes"]) + ITEM_BYTES * found["items"])


async def _room(tx: Transaction, owner: str, room: Room | None, added: int, *, streams: int = 0) -> NoRoom | None:
    """What the owner's streams have too much of, if they get this."""
    if room is None or not (added or streams):
        return None
    used = await tx.row("room_of_owner", owner=owner)
    assert used is not None
    if streams and used["streams"] + streams > room.streams:
        return NoRoom("streams", room.streams)
    return NoRoom("bytes", room.bytes) if used["bytes"] + added > room.bytes else None


async def _within(tx: Transaction, row: Row, position: int, within: int) -> _Source | None:
    """A place in the append that follows the position: so many JSON values of it, or bytes. None: it is shorter."""
    item = await tx.row("item", stream_id=row["stream_id"], idx=position)
    if item is None:
        return None
    if media_type(row["content_type"]) == JSON:
        end = await tx.row("end_of_batch", stream_id=row["stream_id"], start=position, batch=item["batch"])
        return _Source(row, position + within) if end is not None and position + within <= end["end_idx"] else None
    if within > item["size"]:
        return None
    return _Source(row, position, (bytes(item["data"])[:within],))


async def _insert(tx: Transaction, stream: NewStream, source: _Source, room: int, now: str) -> StreamRow | None:
    """Write the row and the items, which count so much; None when the path is taken."""
    inherits = source.row is not None and stream.ttl is None and stream.expires_at is None
    ttl = source.row["ttl"] if source.row is not None and inherits else stream.ttl
    expires_at = source.row["expires_at"] if source.row is not None and inherits else stream.expires_at
    content_type = stream.content_type or (source.row["content_type"] if source.row else "application/octet-stream")
    items = [*source.rest, *stream.items]
    inserted = await tx.row(
        "insert_stream",
        stream_id=stream.stream_id,
        owner=stream.owner,
        path=stream.path,
        content_type=content_type,
        request=_request(stream),
        next_index=source.until + len(items),
        bytes=room,
        closed=int(stream.closed),
        ttl=ttl,
        expires_at=expires_at,
        due_at=expires_at if ttl is None else stamp_after(now, ttl),
        forked_from=None if source.row is None else source.row["stream_id"],
        now=now,
    )
    if inserted is None:
        return None
    if source.row is not None:
        values = {"stream_id": stream.stream_id, "source": source.row["stream_id"], "until": source.until}
        await tx.run("copy_items", **values)
    await _write_items(tx, stream.stream_id, source.until, source.rest)
    await _write_items(tx, stream.stream_id, source.until + len(source.rest), stream.items)
    row = await tx.row("stream", stream_id=stream.stream_id)
    assert row is not None
    return _stream(row)


async def _write_items(tx: Transaction, stream_id: str, start: int, items: Sequence[bytes]) -> None:
    """Write the items of one append."""
    for number, data in enumerate(items):
        await tx.run("insert_item", stream_id=stream_id, idx=start + number, batch=start, size=len(data), data=data)


# --- append -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """What decides whether an append is accepted."""

    row: StreamRow
    # The request of a producer that has closed the stream.
    closed_by: Producer | None
    last_sequence: str | None
    # The newest request of the producer that appends now.
    epoch: int | None
    seq: int | None


async def _append(tx: Transaction, new: NewItems, now: str) -> AppendOutcome | tuple[StreamRow, int]:
    """The stream and its version after the append, or why nothing was appended."""
    found = await tx.row("lock_stream", stream_id=new.stream_id)
    if found is None or found["path"] is None:
        return NoStream()
    if _is_over(found, now):
        kept = await tx.row("has_forks", stream_id=new.stream_id)
        return NoStream() if kept is None else StreamGone()
    state = await _state(tx, found, new)
    if (refused := judge(state, new)) is not None:
        return refused
    added = room_of(new.items)
    if (full := await _room(tx, found["owner"], new.room, added)) is not None:
        return full
    head = found["next_index"] + len(new.items)
    await _write_items(tx, new.stream_id, found["next_index"], new.items)
    producer = new.producer
    if producer is not None:
        place = {"stream_id": new.stream_id, "producer_id": producer.producer_id}
        await tx.run("write_producer", **place, epoch=producer.epoch, seq=producer.seq)
    closed_by = encode([producer.producer_id, producer.epoch, producer.seq]) if new.close and producer else None
    await tx.run(
        "advance_stream",
        stream_id=new.stream_id,
        next_index=head,
        added=added,
        closed=int(new.close),
        closed_by=closed_by,
        last_sequence=found["last_sequence"] if new.sequence is None else new.sequence,
        due_at=found["due_at"] if found["ttl"] is None else stamp_after(now, found["ttl"]),
    )
    row = await tx.row("stream", stream_id=new.stream_id)
    assert row is not None
    return _stream(row), row["version"]


async def _state(tx: Transaction, row: Row, new: NewItems) -> _State:
    known = None
    if new.producer is not None:
        known = await tx.row("producer", stream_id=new.stream_id, producer_id=new.producer.producer_id)
    closed_by = None if row["closed_by"] is None else Producer(*decode(row["closed_by"]))
    epoch, seq = (None, None) if known is None else (known["epoch"], known["seq"])
    return _State(_stream(row), closed_by, row["last_sequence"], epoch, seq)


def judge(state: _State, new: NewItems) -> AppendOutcome | None:
    """Why nothing is appended; None: it is. The protocol fixes the order of these checks."""
    producer = new.producer
    if producer is not None and state.epoch is not None and producer.epoch < state.epoch:
        return StaleEpoch(state.epoch)
    if state.row.closed:
        repeated = (new.content_type is None) if producer is None else state.closed_by == producer
        return Repeated(state.row, state.seq) if repeated else AlreadyClosed(state.row)
    if new.content_type is not None and media_type(new.content_type) != media_type(state.row.content_type):
        return OtherType()
    if producer is not None and (refused := _judge_producer(state, producer)) is not None:
        return refused
    # Headers are Latin-1, so that characters compare as bytes.
    if new.sequence is not None and state.last_sequence is not None and new.sequence <= state.last_sequence:
        return NotInSequence()
    return None


def _judge_producer(state: _State, producer: Producer) -> AppendOutcome | None:
    if state.epoch is None or state.seq is None or producer.epoch > state.epoch:
        if producer.seq == 0:
            return None
        return SequenceGap(0, producer.seq) if state.epoch is None else EpochNotFromZero()
    if producer.seq <= state.seq:
        return Repeated(state.row, state.seq)
    if producer.seq > state.seq + 1:
        return SequenceGap(state.seq + 1, producer.seq)
    return None


# --- the end ------------------------------------------------------------------------------------------------


async def _expire(tx: Transaction, stream_id: str, now: str) -> Sequence[str]:
    found = await tx.row("lock_stream", stream_id=stream_id)
    # A reader may have begun its time to live again.
    if found is None or found["due_at"] is None or found["due_at"] > now:
        return ()
    return await _end(tx, found, now)


async def _end(tx: Transaction, row: Row, now: str) -> Sequence[str]:
    """Close the stream to everybody, and give the paths away that no living fork keeps; returns who has changed."""
    ended: list[str] = []
    current: Row | None = row
    while current is not None:
        stream_id = current["stream_id"]
        keeps_path = await tx.row("has_forks", stream_id=stream_id) is not None
        await tx.run("delete_stream", stream_id=stream_id, now=now, keeps_path=int(keeps_path))
        ended.append(stream_id)
        if keeps_path or current["forked_from"] is None:
            break
        source = await tx.row("lock_stream", stream_id=current["forked_from"])
        current = source if source is not None and source["deleted_at"] is not None else None
    return ended


async def _purge(tx: Transaction, stream_id: str, limit: int) -> int:
    """Delete some of what is left of a deleted stream; returns how much."""
    deleted = len(await tx.rows("purge_items", stream_id=stream_id, limit=limit))
    if deleted < limit:
        deleted += len(await tx.rows("purge_producers", stream_id=stream_id, limit=limit - deleted))
    if deleted < limit:
        await tx.run("purge_stream", stream_id=stream_id)
        deleted += 1
    return deleted


def _is_over(row: Row, now: str) -> bool:
    return row["deleted_at"] is not None or (row["due_at"] is not None and row["due_at"] <= now)


def _stream(row: Row, *, gone: bool = False) -> StreamRow:
    return StreamRow(
        stream_id=row["stream_id"],
        owner=row["owner"],
        path=row["path"] or "",
        content_type=row["content_type"],
        items=row["next_index"],
        closed=bool(row["closed"]),
        ttl=row["ttl"],
        expires_at=row["expires_at"],
        gone=gone,
    )


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
