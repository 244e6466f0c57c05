"""Streams that callers write: what is appended once, who wakes, and what is left of a stream that is gone."""

import asyncio
from dataclasses import replace

import pytest

from perdure.runtime.streams.written import delete_streams
from perdure.store.base import Store
from perdure.store.engine import streams
from perdure.store.streams import (
    ITEM_BYTES,
    AlreadyClosed,
    Appended,
    Created,
    Existed,
    NewItems,
    NewStream,
    NoRoom,
    NoSource,
    NoStream,
    Origin,
    Producer,
    Repeated,
    Room,
    StreamGone,
    StreamRow,
    TooManyItems,
)
from tests.store.conformance.conftest import Database

OWNER = "test||ada"
TEXT = "text/plain"


def new(path: str = "notes", **fields: object) -> NewStream:
    stream = NewStream(stream_id=f"str_{path}", owner=OWNER, path=path, content_type=TEXT)
    return replace(stream, **fields)  # pyright: ignore[reportArgumentType]


def items(*texts: str, stream_id: str = "str_notes", **fields: object) -> NewItems:
    given = NewItems(stream_id=stream_id, content_type=TEXT, items=[text.encode() for text in texts])
    return replace(given, **fields)  # pyright: ignore[reportArgumentType]


async def everything(store: Store, stream_id: str = "str_notes") -> bytes:
    return b"".join(await store.streams.items(stream_id, 0, 100, 1_000_000))


async def test_an_equal_request_finds_the_stream_and_another_one_does_not(store: Store) -> None:
    first = await store.streams.create(new(items=[b"a"]))

    again = await store.streams.create(new(stream_id="str_other", items=[b"a"]))
    other = await store.streams.create(new(stream_id="str_other", ttl=5))

    assert isinstance(first, Created)
    assert again == Existed(first.row)
    assert not isinstance(other, Created | Existed)


async def test_many_requests_at_once_create_one_stream(store: Store) -> None:
    done = await asyncio.gather(*(store.streams.create(new(stream_id=f"str_{number}")) for number in range(8)))

    assert sum(isinstance(each, Created) for each in done) == 1
    assert {each.row.stream_id for each in done if isinstance(each, Created | Existed)} == {
        each.row.stream_id for each in done if isinstance(each, Created)
    }


async def test_a_path_is_of_its_owner_alone(store: Store) -> None:
    await store.streams.create(new())

    assert await store.streams.find("test||bob", "notes") is None
    assert isinstance(await store.streams.delete("test||bob", "notes"), NoStream)
    fork = new("copy", owner="test||bob", fork=Origin("notes"))
    assert isinstance(await store.streams.create(fork), NoSource)


async def test_a_repeated_request_of_a_producer_appends_nothing(store: Store) -> None:
    await store.streams.create(new())
    request = items("a", producer=Producer("p", 0, 0))

    done = await asyncio.gather(*(store.streams.append(request) for _ in range(8)))

    assert sorted(type(each).__name__ for each in done) == ["Appended", *["Repeated"] * 7]
    assert await everything(store) == b"a"


async def test_the_end_and_the_last_items_are_one_transaction(store: Store) -> None:
    await store.streams.create(new())

    done = await store.streams.append(items("a", "b", close=True, producer=Producer("p", 0, 0)))
    late = await store.streams.append(items("c"))
    again = await store.streams.append(items("a", "b", close=True, producer=Producer("p", 0, 0)))

    assert isinstance(done, Appended)
    assert (done.row.items, done.row.closed) == (2, True)
    assert isinstance(late, AlreadyClosed)
    assert isinstance(again, Repeated)
    assert await everything(store) == b"ab"


async def test_an_append_wakes_a_reader_of_another_process(store: Store, other: Store) -> None:
    await store.streams.create(new())
    async with other.streams.watch("str_notes") as watch:
        appending = asyncio.create_task(store.streams.append(items("a")))

        while await everything(other) != b"a":
            assert await watch.changed(20)
    assert isinstance(await appending, Appended)


async def test_the_end_of_a_stream_wakes_a_reader_of_another_process(store: Store, other: Store) -> None:
    await store.streams.create(new())
    async with other.streams.watch("str_notes") as watch:
        deleting = asyncio.create_task(store.streams.delete(OWNER, "notes"))

        while await other.streams.get("str_notes") is not None:
            assert await watch.changed(20)
    assert isinstance(await deleting, StreamRow)


async def test_a_fork_outlives_its_source(store: Store) -> None:
    await store.streams.create(new(items=[b"a", b"b"]))
    await store.streams.create(new("fork", content_type=None, fork=Origin("notes", 1)))

    deleted = await store.streams.delete(OWNER, "notes")
    while await store.streams.sweep(100):
        pass

    assert isinstance(deleted, StreamRow)
    assert await everything(store, "str_fork") == b"a"
    found = await store.streams.find(OWNER, "notes")
    assert found is not None
    assert found.gone
    assert isinstance(await store.streams.append(items("c")), StreamGone)


async def test_the_last_fork_takes_its_sources_with_it(store: Store, database: Database) -> None:
    await store.streams.create(new(items=[b"a"]))
    await store.streams.create(new("fork", fork=Origin("notes")))
    await store.streams.create(new("leaf", fork=Origin("fork")))
    await store.streams.delete(OWNER, "notes")
    await store.streams.delete(OWNER, "fork")

    await store.streams.delete(OWNER, "leaf")
    free = [await store.streams.find(OWNER, path) for path in ("notes", "fork", "leaf")]
    while await store.streams.sweep(100):
        pass

    assert free == [None, None, None]
    for table in ("streams", "stream_items", "stream_producers"):
        assert database.run(f"SELECT * FROM {table}") == []  # pyright: ignore[reportArgumentType]


async def test_what_has_expired_is_not_there_and_is_swept(store: Store, database: Database) -> None:
    await store.streams.create(new(items=[b"a"], expires_at="2001-01-01T00:00:00.000Z"))

    found = await store.streams.find(OWNER, "notes"), await store.streams.append(items("b"))
    again = await store.streams.create(new(stream_id="str_again", items=[b"c"]))
    while await store.streams.sweep(100):
        pass

    assert found[0] is None
    assert isinstance(found[1], NoStream)
    assert isinstance(again, Created)
    assert await everything(store, "str_again") == b"c"
    assert [row[0] for row in database.run("SELECT stream_id FROM stream_items")] == ["str_again"]


async def test_a_sweep_deletes_a_large_stream_piece_by_piece(store: Store, database: Database) -> None:
    await store.streams.create(new(items=[b"a"] * 25))
    await store.streams.delete(OWNER, "notes")

    first = await store.streams.sweep(10)

    assert first == 10
    assert database.run("SELECT COUNT(*) FROM stream_items")[0][0] == 15


@pytest.mark.parametrize(("most_bytes", "read"), [(100, 3), (7, 1), (10, 2), (1, 1)])
async def test_a_page_has_no_more_bytes_than_it_may_but_always_an_item(
    store: Store, most_bytes: int, read: int
) -> None:
    await store.streams.create(new(items=[b"a" * 5, b"b" * 5, b"c" * 5]))

    assert len(await store.streams.items("str_notes", 0, 100, most_bytes)) == read


ROOM = Room(streams=2, bytes=2 * (10 + ITEM_BYTES))


async def test_an_owner_has_only_so_many_streams(store: Store) -> None:
    for path in ("one", "two"):
        assert isinstance(await store.streams.create(new(path, room=ROOM)), Created)

    third = new("three", room=ROOM)
    refused = await store.streams.create(third)
    again = await store.streams.create(new("two", stream_id="str_other", room=ROOM))
    other = await store.streams.create(new("three", stream_id="str_bob", owner="test||bob", room=ROOM))
    await store.streams.delete(OWNER, "one")

    assert refused == NoRoom("streams", 2)
    assert isinstance(again, Existed)
    assert isinstance(other, Created)
    assert isinstance(await store.streams.create(third), Created)


async def test_the_streams_of_an_owner_have_only_so_many_bytes(store: Store) -> None:
    await store.streams.create(new("one", items=[b"a" * 10], room=ROOM))
    await store.streams.create(new("two", room=ROOM))

    large = await store.streams.append(items("a" * 11, stream_id="str_two", room=ROOM))
    fits = await store.streams.append(items("a" * 10, stream_id="str_two", room=ROOM))
    one_more = await store.streams.append(items("a", stream_id="str_one", room=ROOM))
    end = await store.streams.append(items(stream_id="str_one", content_type=None, close=True, room=ROOM))
    await store.streams.delete(OWNER, "one")

    assert large == one_more == NoRoom("bytes", ROOM.bytes)
    assert isinstance(fits, Appended)
    assert isinstance(end, Appended)
    assert isinstance(await store.streams.append(items("a", stream_id="str_two", room=ROOM)), Appended)


async def test_a_fork_counts_what_it_copies(store: Store) -> None:
    await store.streams.create(new("one", items=[b"a" * 10, b"b"], room=ROOM))

    whole = await store.streams.create(new("copy", fork=Origin("one"), room=ROOM))
    part = await store.streams.create(new("copy", fork=Origin("one", position=0), room=ROOM))

    assert whole == NoRoom("bytes", ROOM.bytes)
    assert isinstance(part, Created)


async def test_a_fork_of_too_many_bytes_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_COPIED_BYTES", 10)
    await store.streams.create(new("one", items=[b"a" * 10, b"b"]))

    assert await store.streams.create(new("copy", fork=Origin("one"))) == TooManyItems()
    assert isinstance(await store.streams.create(new("copy", fork=Origin("one", position=1))), Created)


async def test_all_streams_of_an_owner_are_deleted_together(store: Store, database: Database) -> None:
    await store.streams.create(new(items=[b"a"]))
    await store.streams.create(new("copy", fork=Origin("notes")))
    await store.streams.delete(OWNER, "notes")
    await store.streams.create(new("again", fork=Origin("copy")))
    await store.streams.create(new(stream_id="str_bob", owner="test||bob"))

    deleted = await delete_streams(store.streams, OWNER)

    assert deleted == 2
    assert [tuple(row) for row in database.run("SELECT stream_id FROM streams")] == [("str_bob",)]
    assert database.run("SELECT stream_id FROM stream_items") == []
