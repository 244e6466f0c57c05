"""Two hundred readers of server-sent events, two APIs that are killed in turn: nobody misses or repeats an event."""

import asyncio
import contextlib
import itertools
from urllib.parse import urlsplit

import pytest

from tests.support.chaos.scripts import drip, say
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

_WATCHERS = 200
_PAUSE = 0.05


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge", apis=2)


class Watcher:
    """Reads one session, and goes to the other API when its connection ends."""

    def __init__(self, urls: list[str], session_id: str, first: int) -> None:
        self._addresses = itertools.cycle(urls[first:] + urls[:first])
        self._session_id = session_id
        self.seen: list[int] = []
        self.connections = 0

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._read(urlsplit(next(self._addresses)).netloc)
            await asyncio.sleep(_PAUSE)

    async def _read(self, address: str) -> None:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        last = f"last-event-id: {self.seen[-1]}\r\n" if self.seen else ""
        request = f"GET /v1/sessions/{self._session_id}/events/stream HTTP/1.1\r\nhost: {address}\r\n{last}\r\n"
        try:
            writer.write(request.encode())
            assert (await reader.readline()).split()[1] == b"200"
            self.connections += 1
            while line := await reader.readline():
                if line.startswith(b"id: "):
                    self.seen.append(int(line[4:]))
        finally:
            writer.close()


async def test_two_hundred_watchers_outlive_each_api_and_get_each_event_once(stack: Stack) -> None:
    urls = list(stack.api_urls)
    async with stack.talk() as talk:
        await talk.create(say().message)
        await talk.until_boundary()
        watchers = [Watcher(urls, talk.session_id, number % 2) for number in range(_WATCHERS)]
        watching = [asyncio.create_task(each.watch()) for each in watchers]
        await until(lambda: all(each.seen for each in watchers), "all of them to read")
        for killed in (0, 1):
            # The other one serves whoever asks meanwhile.
            async with stack.talk(1 - killed) as other:
                other.session_id, other.token, other.cursor = talk.session_id, talk.token, talk.cursor
                script = drip()
                await other.send(script.message)
                await other.until("message.appended", talk.cursor)
                stack.apis[killed].kill()
                assert text(await other.until_boundary()) == script.answer
                talk.cursor = other.cursor
            stack.start_api({"PERDURE_PORT": urls[killed].rpartition(":")[2]})
        await until(
            lambda: all(each.seen[-1] == talk.cursor - 1 for each in watchers), "all of them to have everything"
        )
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    assert all(each.seen == list(range(talk.cursor)) for each in watchers)
    assert all(each.connections > 1 for each in watchers)
