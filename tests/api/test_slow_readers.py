"""Readers that do not read: they delay themselves, and no other reader."""

import asyncio
import contextlib
import socket
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api.stream.broadcast import Pace
from perdure.store.values import Commit
from tests.api.process import ApiProcess, api_process
from tests.api.served import URL, Api, serving, turn_events
from tests.support.processes import PATIENCE
from tests.support.waiting import until

#: Posts may take this many times as long beside readers. The promise is 1.2; the rest is for the clock.
SLOWED = 1.5


def silent(api: Api | ApiProcess, session_id: str) -> socket.socket:
    """A client that asks for the stream and then never reads a byte."""
    return silent_at(api, f"{URL}/{session_id}/stream")


def silent_at(api: Api | ApiProcess, path: str) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    sock = socket.socket()
    # So that little fits between us and it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return sock


async def flood(api: Api, session_id: str, turns: int, first: int = 0) -> None:
    for number in range(first, first + turns):
        await api.emit(session_id, *turn_events(number, ["x" * 20_000] * 10))


async def test_a_reader_that_never_reads_delays_no_other(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(ring_bytes=100_000)) as api:
        session_id = (await api.create())["sessionId"]
        with silent(api, session_id):
            await until(lambda: api.broadcasts.watched == 1)
            async with api.stream(session_id) as reading:
                await flood(api, session_id, 5)
                events = await reading.events(5 * 16)

            assert [event["meta"]["index"] for event in events] == list(range(5 * 16))
            # The one that reads has left; the other one still holds what fits into its connection, and no more.
            await until(lambda: api.broadcasts.readers == 1)


async def test_a_reader_that_takes_nothing_for_long_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, pace=Pace(stall=0.3)) as api:
        session_id = (await api.create())["sessionId"]
        await flood(api, session_id, 5)
        with silent(api, session_id) as sock:
            await until(lambda: api.broadcasts.readers == 1)
            await until(lambda: api.broadcasts.readers == 0)

            assert not (await drained(sock)).endswith(b"0\r\n\r\n")
    assert "took nothing for 0.3 s" in caplog.text
    assert "without completing response" not in caplog.text


@pytest.mark.parametrize("query", ["", "?offset=-1&live=long-poll", "?offset=-1&live=sse"])
async def test_a_reader_of_a_durable_stream_that_takes_nothing_for_long_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, query: str
) -> None:
    async with serving(tmp_path, streams="on", pace=Pace(stall=0.3)) as api:
        path, kind = "/v1/stream/large", {"content-type": "text/plain"}
        await api.http.put(path, content=b"x" * 4_000_000, headers=kind)
        with silent_at(api, f"{path}{query}") as sock:
            await until(lambda: "took nothing for 0.3 s" in caplog.text)

            assert not (await drained(sock)).endswith(b"0\r\n\r\n")
    assert "without completing response" not in caplog.text


async def drained(sock: socket.socket) -> bytes:
    """What the connection still held. One that was ended in order closes with an empty chunk."""

    def read() -> bytes:
        sock.settimeout(PATIENCE)
        held = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65_536):
                held = (held + piece)[-100:]
        return held

    return await asyncio.to_thread(read)


async def test_all_rings_together_are_bounded_and_nothing_is_lost(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, pace=Pace(ring_bytes=100_000, rings_bytes=150_000)) as api,
        contextlib.AsyncExitStack() as opened,
    ):
        ids = [(await api.create())["sessionId"] for _ in range(5)]
        readings = [await opened.enter_async_context(api.stream(session_id)) for session_id in ids]
        for turn in range(2):
            for session_id in ids:
                await api.emit(session_id, *turn_events(turn, ["x" * 2_000] * 10))

        read = [await reading.events(2 * 16) for reading in readings]

        assert 0 < api.broadcasts.held <= 150_000
        for events in read:
            assert [event["meta"]["index"] for event in events] == list(range(2 * 16))
        await opened.aclose()
        await until(lambda: api.broadcasts.held == 0)


async def test_a_late_reader_catches_up_past_the_ring(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(ring_bytes=50_000)) as api:
        session_id = (await api.create())["sessionId"]
        async with api.stream(session_id) as slow:
            await flood(api, session_id, 3)
            async with api.stream(session_id) as quick:
                expected = await quick.events(3 * 16)

            assert await slow.events(3 * 16) == expected


@pytest.mark.alone
async def test_two_hundred_watchers_do_not_slow_posts(api: Api) -> None:
    watched = (await api.create())["sessionId"]

    async def post() -> float:
        began = time.perf_counter()
        await api.create()
        return time.perf_counter() - began

    async def typical() -> float:
        # The best of some rounds: the machine may do other things besides.
        return min([statistics.median([await post() for _ in range(20)]) for _ in range(4)])

    async def slowdown() -> float:
        alone = await typical()
        async with contextlib.AsyncExitStack() as watchers:
            for _ in range(200):
                watchers.enter_context(silent(api, watched))
            await until(lambda: api.broadcasts.readers == 200)
            crowded = await typical()
        await until(lambda: api.broadcasts.readers == 0)
        return crowded / alone

    await typical()
    ratios = [await slowdown()]
    # And it may begin or end with them just while the readers are there.
    while min(ratios) > SLOWED and len(ratios) < 5:
        ratios.append(await slowdown())
    assert min(ratios) < SLOWED, ratios


@pytest.mark.alone
async def test_two_hundred_readers_of_a_busy_session_leave_room_for_posts(api: Api) -> None:
    watched = (await api.create())["sessionId"]

    async def slowest() -> float:
        times: list[float] = []
        for _ in range(25):
            began = time.perf_counter()
            await api.create()
            times.append(time.perf_counter() - began)
        return max(times)

    async with contextlib.AsyncExitStack() as watchers:
        for _ in range(200):
            watchers.enter_context(silent(api, watched))
        await until(lambda: api.broadcasts.readers == 200)
        talking = asyncio.create_task(talk(api, watched))
        try:
            # The best of a few rounds: the machine may do other things besides.
            assert min([await slowest() for _ in range(3)]) < 0.5
        finally:
            talking.cancel()


async def talk(api: Api, session_id: str) -> None:
    """One short turn after the other, without end."""
    number = 0
    while True:
        await api.emit(session_id, *turn_events(number, ["a few", " words"]))
        number += 1


@pytest.mark.alone
async def test_five_hundred_readers_that_do_not_read_delay_no_other(tmp_path: Path) -> None:
    async with api_process(tmp_path) as api:
        created = (await api.http.post(URL, json={"message": "x"})).json()["sessionId"]
        # A long text as it was once written: each piece shows all of the text before it.
        pieces = ["x" * 128] * 470
        told = turn_events(0, pieces)
        await api.store.commit(Commit(created, events=told))
        before = api.memory()

        held_up: list[float] = []
        while not held_up or (min(held_up) >= 1 and len(held_up) < 3):
            with api.watched() as watched, contextlib.ExitStack() as readers:
                for _ in range(25):
                    for _ in range(20):
                        readers.enter_context(silent(api, created))
                    # Not all at once: it is not their coming that is measured.
                    await api.http.get("/eve/v1/health")
                async with api.http.stream("GET", f"{URL}/{created}/stream") as answer:
                    lines = answer.aiter_lines()
                    read = [line async for line in aislice(lines, len(told)) if line]
                grown = api.memory() - before
            assert len(read) == len(told) - 1
            assert grown < 150_000_000
            held_up.append(watched.longest)

    # Noise of the machine only makes it longer: the best try counts.
    assert min(held_up) < 1


async def aislice(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield await anext(lines)


async def test_readers_that_are_behind_are_cut_when_all_hold_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, pace=Pace(unsent_bytes=2_000_000)) as api:
        session_id = (await api.create())["sessionId"]
        await flood(api, session_id, 10)
        with contextlib.ExitStack() as readers:
            for _ in range(40):
                readers.enter_context(silent(api, session_id))
            await until(lambda: "all hold too much" in caplog.text)
            async with api.stream(session_id) as reading:
                events = await reading.events(10 * 16)

    assert [event["meta"]["index"] for event in events] == list(range(10 * 16))
    assert "took nothing" not in caplog.text
