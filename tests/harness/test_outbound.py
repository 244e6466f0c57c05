"""Requests to other servers: where they may go, and how much of an answer is read."""

import asyncio
import socket
from collections import Counter
from typing import Any

import pytest

from perdure.harness.remote.outbound import Outbound, Reach, Unreachable, is_allowed
from tests.remote.fake import Fake

PUBLIC, PRIVATE, METADATA = "93.184.216.34", "10.0.0.7", "169.254.169.254"


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """From now on every name has these addresses."""

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("addresses", "reach", "allowed"),
    [
        ([PUBLIC], "public", True),
        ([PRIVATE], "public", False),
        ([PUBLIC, PRIVATE], "public", False),
        (["127.0.0.1"], "public", False),
        (["127.0.0.1"], "loopback", True),
        ([PRIVATE], "loopback", False),
        ([PRIVATE], "private", True),
        ([METADATA], "private", False),
        (["100.64.0.1"], "public", False),
    ],
)
async def test_what_a_name_means_decides_whether_it_may_be_used(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], reach: Reach, allowed: bool
) -> None:
    resolves_to(monkeypatch, *addresses)

    assert await is_allowed("https://parent.example/eve/v1/callback/t", reach) is allowed


async def test_a_name_that_does_not_resolve_now_may_do_so_later() -> None:
    assert await is_allowed("https://parent.invalid/eve/v1/callback/t", "public")


async def test_a_name_that_has_become_a_private_one_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Fake() as fake:
        resolves_to(monkeypatch, "127.0.0.1")

        with pytest.raises(Unreachable, match="not allowed"):
            await Outbound().post(f"http://parent.example:{fake.port}/", b"{}", {}, reach="public", seconds=5)

    assert fake.asked == []


async def test_the_request_goes_to_the_checked_address_under_the_name_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Fake() as fake:
        resolves_to(monkeypatch, "127.0.0.1")
        await Outbound().post(
            f"http://parent.example:{fake.port}/eve/v1/session", b"{}", {}, reach="private", seconds=5
        )

    assert fake.asked[0].headers["host"] == f"parent.example:{fake.port}"


async def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    async with Fake(callbacks=[302]) as fake:
        fake.redirect = f"{fake.url}/elsewhere"
        answer = await Outbound().post(f"{fake.url}/callback/t", b"{}", {}, reach="loopback", seconds=5)

    assert (answer.status, len(fake.asked)) == (302, 1)


async def test_only_so_much_of_an_answer_is_read() -> None:
    async with Fake(session={"sessionId": "x" * 100_000}) as fake:
        answer = await Outbound().post(f"{fake.url}/s", b"{}", {}, reach="loopback", seconds=5, most=1_000)

    assert len(answer.body) == 1_000


async def test_a_stream_without_an_end_is_read_for_some_time() -> None:
    async with Fake(floods=True) as fake:
        read = await Outbound().lines(
            f"{fake.url}/stream?startIndex=0",
            {},
            reach="loopback",
            seconds=2,
            most=50_000,
            is_last=lambda line: False,
        )

    assert read.lines
    assert sum(map(len, read.lines)) < 400_000


async def test_other_work_goes_on_while_a_stream_comes_in_tiny_pieces() -> None:
    turn = 0
    read_in: Counter[int] = Counter()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\n\n\r\n" * 40_000 + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def is_last(line: bytes) -> bool:
        read_in[turn] += 1
        return False

    async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        working = asyncio.create_task(work())
        await Outbound().lines(url, {}, reach="loopback", seconds=60, most=100_000, is_last=is_last)
        working.cancel()

    assert read_in.total() == 40_000
    assert max(read_in.values()) <= 1_000


async def test_a_line_may_come_in_many_pieces() -> None:
    raw = b"{" + b"x" * 300_000 + b"}\n\nsecond\nrest"
    async with Fake(raw=raw) as fake:
        read = await Outbound().lines(
            f"{fake.url}/s?startIndex=0", {}, reach="loopback", seconds=5, most=1_000_000, is_last=lambda line: False
        )

    assert read.lines == raw.split(b"\n")[:-1]


async def test_a_server_that_does_not_answer_is_unreachable_in_time() -> None:
    async with Fake(hang=True) as fake:
        with pytest.raises(Unreachable, match="in time"):
            await Outbound().post(f"{fake.url}/s", b"{}", {}, reach="loopback", seconds=0.3)
