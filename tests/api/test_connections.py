"""Connections that are slow, large or many: they end, and leave room for others."""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from api.connections import ConnectionLimits
from perdure.store.values import SessionQuery
from tests.api.process import ApiProcess, api_process
from tests.api.served import URL, Api, serving
from tests.support.processes import PATIENCE

HEALTH = b"GET /eve/v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
POST = f"POST {URL} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n".encode()
CHUNKED = f"POST {URL} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n".encode()


@contextlib.contextmanager
def connected(api: Api | ApiProcess, sent: bytes = b"") -> Generator[socket.socket]:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
        sock.sendall(sent)
        yield sock


async def received(sock: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""

    def read() -> bytes:
        response = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65_536):
                response += piece
        return response

    return await asyncio.to_thread(read)


async def answered(sock: socket.socket) -> bytes:
    """One whole answer; the server may send its head and its body in two pieces."""

    def read() -> bytes:
        with sock.makefile("rb") as response:
            head = b"".join(iter(response.readline, b"\r\n"))
            [length] = re.findall(rb"content-length: (\d+)", head)
            return head + response.read(int(length))

    return await asyncio.to_thread(read)


QUICK = ConnectionLimits(100, head_time=0.3, body_time=0.3, rest_time=0.3, stall_time=0.3)


async def taken(api: Api, head: bytes, more: bytes) -> int:
    """How many bytes of `more`, repeated without end, the server takes; with what fits into the system's buffers."""

    def flood() -> int:
        sent = 0
        with connected(api, head) as sock, contextlib.suppress(OSError):
            while sent < 100_000_000:
                sock.sendall(more)
                sent += len(more)
        return sent

    return await asyncio.to_thread(flood)


async def test_a_head_that_never_ends_is_refused(api: Api) -> None:
    assert await taken(api, HEALTH, b"x-more: " + b"x" * 50_000 + b"\r\n") < 20_000_000


@pytest.mark.parametrize("key", [b"", b"x-api-key: wrong\r\n"], ids=["let in", "not let in"])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x-more: " + b"x" * 50_000 + b"\r\n"),
        (b"2\r\n{}\r\n0\r\nx-more: ", b"x" * 50_000),
        (b"2;x=", b"x" * 50_000),
    ],
    ids=["trailers", "a trailer", "a chunk extension"],
)
async def test_what_surrounds_a_body_without_end_is_cut_off(api: Api, key: bytes, start: bytes, more: bytes) -> None:
    assert await taken(api, CHUNKED + key + b"\r\n" + start, more) < 20_000_000


async def test_a_trailer_is_no_header(people: Api) -> None:
    body = b'd\r\n{"message":1}\r\n0\r\nx-who: ada\r\n\r\n'

    with connected(people, CHUNKED + b"\r\n" + body) as sock:
        response = await answered(sock)

    assert response.startswith(b"HTTP/1.1 401 ")


async def test_a_body_of_small_chunks_with_a_trailer_is_taken(api: Api) -> None:
    message = b'{"message":"' + b"x" * 30_000 + b'"}'
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in message)

    with connected(api, CHUNKED + b"\r\n" + chunks + b"0\r\nx-more: x\r\n\r\n") as sock:
        response = await answered(sock)

    assert response.startswith(b"HTTP/1.1 202 ")


async def test_a_head_that_is_too_large_is_431(api: Api) -> None:
    with connected(api, HEALTH + b"x-more: " + b"x" * 33_000 + b"\r\n\r\n") as sock:
        response = await received(sock)

    assert response.startswith(b"HTTP/1.1 431 ")
    assert (await api.http.get("/eve/v1/health", headers={"x-more": "x" * 30_000})).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /", HEALTH], ids=["nothing", "a line", "a word", "half a head"])
async def test_a_head_has_its_time(tmp_path: Path, sent: bytes) -> None:
    async with serving(tmp_path, terms=QUICK) as api:
        with connected(api, sent) as sock:
            response = await asyncio.wait_for(received(sock), PATIENCE)

    assert response.startswith(b"HTTP/1.1 408 ") or response == b""


async def test_the_second_head_of_a_connection_has_its_time_too(tmp_path: Path) -> None:
    async with serving(tmp_path, terms=QUICK) as api:
        with connected(api, HEALTH + b"\r\n") as sock:
            assert (await answered(sock)).startswith(b"HTTP/1.1 200 ")
            sock.sendall(b"GET /eve")
            response = await asyncio.wait_for(received(sock), PATIENCE)

    assert response.startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_drips_has_its_time(tmp_path: Path) -> None:
    async with serving(tmp_path, terms=QUICK) as api:
        with connected(api, POST + b"\r\n") as sock:

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock.sendall(b"x")
                        time.sleep(0.01)

            await asyncio.wait_for(asyncio.to_thread(drip), PATIENCE)


async def test_a_body_that_comes_at_a_fair_pace_is_waited_for(tmp_path: Path) -> None:
    message = b'{"message": "' + b"x" * 200_000 + b'"}'

    # Enough to bridge a moment in which the machine does other things.
    async with serving(tmp_path, terms=replace(QUICK, body_time=1.0)) as api:
        head = f"POST {URL} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(message)}\r\n\r\n"
        with connected(api, head.encode()) as sock:
            # Longer than a body has that does not come: 32 KiB are worth a second.
            for start in range(0, len(message), 5_000):
                await asyncio.to_thread(sock.sendall, message[start : start + 5_000])
                await asyncio.sleep(0.03)
            response = await received(sock)

    assert response.startswith(b"HTTP/1.1 202 ")


async def test_the_rest_of_a_refused_body_does_not_come_for_ever(tmp_path: Path) -> None:
    async with serving(tmp_path, terms=QUICK) as api:
        with connected(api, POST + b"x-api-key: wrong\r\n\r\n") as sock:
            response = await asyncio.wait_for(received(sock), PATIENCE)

    assert response.startswith(b"HTTP/1.1 401 ")


REFUSED = [
    POST + b"x-api-key: wrong\r\n",
    POST + b"x-api-key: wrong\r\nconnection: close\r\n",
    POST.replace(b"1.1", b"1.0", 1) + b"x-api-key: wrong\r\n",
    CHUNKED + b"x-api-key: wrong\r\n",
    CHUNKED + b"x-api-key: wrong\r\nconnection: close\r\n",
]
KINDS = ["kept", "closed", "HTTP/1.0", "chunked", "chunked and closed"]
CHUNK = b"c350\r\n" + b"x" * 50_000 + b"\r\n"


@pytest.mark.parametrize("head", REFUSED, ids=KINDS)
async def test_who_sends_all_of_a_refused_body_gets_the_refusal(tmp_path: Path, head: bytes) -> None:
    chunked = b"chunked" in head
    sent = b"0\r\n\r\n" if chunked else b""

    # Enough to bridge a moment in which the machine does other things.
    async with serving(tmp_path, terms=replace(QUICK, rest_time=1.0)) as api:
        with connected(api, head + b"\r\n") as sock:
            # Longer than what is left of a body has when it does not come; the answer is long there.
            for _ in range(20):
                await asyncio.to_thread(sock.sendall, CHUNK if chunked else CHUNK[6:-2])
                await asyncio.sleep(0.1)
            sock.sendall(sent)
            response = await answered(sock)

    assert response.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("head", REFUSED, ids=KINDS)
async def test_the_rest_of_a_refused_body_has_an_end(tmp_path: Path, head: bytes) -> None:
    endless = head.replace(b"1000000", b"1000000000") + b"\r\n"

    async with serving(tmp_path, terms=replace(QUICK, rest_bytes=1_000_000)) as api:
        assert await taken(api, endless, CHUNK) < 20_000_000


@pytest.mark.parametrize("head", REFUSED, ids=KINDS)
async def test_the_rest_of_a_refused_body_that_drips_has_its_time(tmp_path: Path, head: bytes) -> None:
    async with serving(tmp_path, terms=QUICK) as api:
        with connected(api, head + b"\r\n" + (b"ffff\r\n" if b"chunked" in head else b"")) as sock:

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock.sendall(b"x")
                        time.sleep(0.01)

            await asyncio.wait_for(asyncio.to_thread(drip), PATIENCE)


async def test_who_sends_all_of_a_head_that_is_too_large_gets_the_refusal(api: Api) -> None:
    with connected(api, HEALTH) as sock:
        await asyncio.to_thread(sock.sendall, b"x-more: " + b"x" * 800_000)
        response = await answered(sock)

    assert response.startswith(b"HTTP/1.1 431 ")


async def test_what_follows_on_the_last_request_of_a_connection_is_not_done(tmp_path: Path) -> None:
    last = POST.replace(b"1000000", b"10") + b"x-api-key: wrong\r\nconnection: close\r\n\r\n"
    message = b'{"message": "hello"}'
    another = f"POST {URL} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(message)}\r\n\r\n".encode() + message

    async with serving(tmp_path) as api:
        with connected(api, last) as sock:
            assert (await answered(sock)).startswith(b"HTTP/1.1 401 ")
            sock.sendall(b"x" * 10 + another)
            sock.shutdown(socket.SHUT_WR)
            assert await received(sock) == b""
        found = await api.store.sessions(SessionQuery())

    assert found.sessions == []


@pytest.mark.parametrize("head", REFUSED, ids=KINDS)
async def test_who_sends_the_rest_of_a_refused_body_goes_before_one_that_is_served(tmp_path: Path, head: bytes) -> None:
    async with serving(tmp_path, terms=ConnectionLimits(3)) as api:
        with contextlib.ExitStack() as refused:
            for _ in range(10):
                sock = refused.enter_context(connected(api, head + b"\r\n"))
                assert (await answered(sock)).startswith(b"HTTP/1.1 401 ")
            created = await api.http.post(URL, json={"message": "x"})

    assert created.status_code == 202


async def test_idle_connections_leave_room(tmp_path: Path) -> None:
    async with api_process(tmp_path, descriptors=256) as api:
        # How fast the machine is beside the other tests.
        calm = [await asyncio.to_thread(api.health) for _ in range(5)]
        with contextlib.ExitStack() as idle:
            for _ in range(300):
                idle.enter_context(connected(api))
            took = [await asyncio.to_thread(api.health) for _ in range(5)]
            created = await api.http.post(URL, json={"message": "x"})

    assert created.status_code == 202
    assert max(took) < 5 + max(calm)


async def test_a_connection_that_waits_goes_before_one_that_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, terms=ConnectionLimits(3)) as api:
        session_id = (await api.create())["sessionId"]
        async with api.stream(session_id) as reading:
            assert await reading.line() == ""
            with contextlib.ExitStack() as idle:
                for _ in range(10):
                    idle.enter_context(connected(api))
                assert (await api.http.get("/eve/v1/health")).status_code == 200
            await api.deliver(await api.create())

            assert reading.answer.status_code == 200


async def test_one_more_than_can_be_served_is_503(tmp_path: Path) -> None:
    async with serving(tmp_path, terms=ConnectionLimits(1)) as api:
        session_id = (await api.create())["sessionId"]
        stream = f"GET {URL}/{session_id}/stream HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
        with connected(api, stream) as reader:
            assert (await asyncio.to_thread(reader.recv, 100)).startswith(b"HTTP/1.1 200 ")
            with connected(api) as other:
                response = await received(other)

    assert response.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in response
