"""Readers that do not read: they cost themselves, and nobody else."""

import asyncio
import contextlib
import socket
import statistics
import time
from pathlib import Path

import pytest

from api.feed import Pace
from tests.api.served import URL, Api, serving, turn_events, until

pytestmark = pytest.mark.alone


def silent(api: Api, session_id: str) -> socket.socket:
    """A client that asks for the stream and then never reads a byte."""
    host, port = api.url.removeprefix("http://").split(":")
    sock = socket.socket()
    # So that little fits between us and it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(f"GET {URL}/{session_id}/stream HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return sock


async def flood(api: Api, session_id: str, turns: int, first: int = 0) -> None:
    for number in range(first, first + turns):
        await api.tell(session_id, *turn_events(number, ["x" * 20_000] * 10))


async def test_a_reader_that_never_reads_holds_nobody_up(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(ring_bytes=100_000)) as api:
        session_id = (await api.create())["sessionId"]
        with silent(api, session_id):
            await until(lambda: api.feeds.watched == 1)
            async with api.stream(session_id) as reading:
                await flood(api, session_id, 5)
                events = await reading.events(5 * 16)

            assert [event["meta"]["index"] for event in events] == list(range(5 * 16))
            # The one that reads has left; the other one still holds what fits into its connection, and no more.
            await until(lambda: api.feeds.readers == 1)


async def test_a_reader_that_takes_nothing_for_long_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, pace=Pace(stall=0.3)) as api:
        session_id = (await api.create())["sessionId"]
        await flood(api, session_id, 5)
        with silent(api, session_id) as sock:
            await until(lambda: api.feeds.readers == 1)
            await until(lambda: api.feeds.readers == 0)

            assert not (await drained(sock)).endswith(b"0\r\n\r\n")
    assert "took nothing for 0.3 s" in caplog.text
    assert "without completing response" not in caplog.text


async def drained(sock: socket.socket) -> bytes:
    """What the connection still held. One that was ended in order closes with an empty chunk."""

    def read() -> bytes:
        sock.settimeout(10)
        held = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65_536):
                held = (held + piece)[-100:]
        return held

    return await asyncio.to_thread(read)


async def test_a_late_reader_catches_up_past_the_ring(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(ring_bytes=50_000)) as api:
        session_id = (await api.create())["sessionId"]
        async with api.stream(session_id) as slow:
            await flood(api, session_id, 3)
            async with api.stream(session_id) as quick:
                expected = await quick.events(3 * 16)

            assert await slow.events(3 * 16) == expected


async def test_two_hundred_watchers_do_not_slow_posts(api: Api) -> None:
    watched = (await api.create())["sessionId"]

    async def post() -> float:
        began = time.perf_counter()
        await api.create()
        return time.perf_counter() - began

    async def typical() -> float:
        # The best of some rounds: the machine may do other things besides.
        return min([statistics.median([await post() for _ in range(20)]) for _ in range(8)])

    await typical()
    alone = await typical()
    async with contextlib.AsyncExitStack() as watchers:
        for _ in range(200):
            watchers.enter_context(silent(api, watched))
        await until(lambda: api.feeds.readers == 200)
        crowded = await typical()

    # The promise is 1.2; the rest is for the clock.
    assert crowded < alone * 1.5


async def test_two_hundred_readers_of_a_busy_session_leave_room_for_posts(api: Api) -> None:
    watched = (await api.create())["sessionId"]
    async with contextlib.AsyncExitStack() as watchers:
        for _ in range(200):
            watchers.enter_context(silent(api, watched))
        await until(lambda: api.feeds.readers == 200)
        talking = asyncio.create_task(talk(api, watched))
        try:
            slowest = 0.0
            for _ in range(50):
                began = time.perf_counter()
                await api.create()
                slowest = max(slowest, time.perf_counter() - began)
        finally:
            talking.cancel()

    assert slowest < 0.5


async def talk(api: Api, session_id: str) -> None:
    """One short turn after the other, without end."""
    number = 0
    while True:
        await api.tell(session_id, *turn_events(number, ["a few", " words"]))
        number += 1
