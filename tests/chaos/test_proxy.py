"""The relay that lets connections go dead."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.support.proxy import Proxy

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def relayed() -> AsyncGenerator[Proxy]:
    """A relay to a server that says everything again."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        with Proxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
            yield proxy


async def opened(proxy: Proxy) -> Ends:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def said(ends: Ends, words: bytes) -> bytes:
    reader, writer = ends
    writer.write(words)
    return await reader.readexactly(len(words))


async def test_what_is_said_is_forwarded_both_ways() -> None:
    async with relayed() as proxy:
        assert await said(await opened(proxy), b"hello") == b"hello"


async def test_a_stalled_line_says_nothing_and_stays_open_and_then_continues() -> None:
    async with relayed() as proxy:
        ends = await opened(proxy)
        assert await said(ends, b"one") == b"one"

        proxy.stall()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(said(ends, b"two"), 0.2)
        late = await opened(proxy)
        proxy.resume()

        assert await ends[0].readexactly(3) == b"two"
        assert await said(late, b"three") == b"three"


async def test_what_a_broken_line_held_back_is_lost_and_a_new_one_is_served() -> None:
    async with relayed() as proxy:
        ends = await opened(proxy)
        assert await said(ends, b"one") == b"one"
        proxy.stall()
        ends[1].write(b"two")

        proxy.drop()

        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ends[0].readexactly(3)
        assert await said(await opened(proxy), b"three") == b"three"


async def test_the_end_of_a_connection_is_forwarded() -> None:
    async with relayed() as proxy:
        reader, writer = await opened(proxy)
        writer.write(b"bye")
        writer.write_eof()

        assert await reader.read() == b"bye"
