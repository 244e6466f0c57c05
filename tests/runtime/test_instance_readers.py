"""A reader of an instance of the real product, through approvals, cancels, ends of sessions and deaths of APIs."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.waiting import until

AGENT = "/agents/chat/desk"
FIRST = f"{0:016d}_{0:016d}"

Json = dict[str, Any]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def stack(request: pytest.FixtureRequest, make_stack: StackFactory) -> Stack:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    return make_stack(provider=True, agents="tests.runtime.served:chat", apis=2, database_url=url)


class Follower:
    """Follows the stream by server-sent events, at one API and then at another one, as a client does."""

    def __init__(self, urls: list[str]) -> None:
        self.items: list[Json] = []
        self._urls = urls
        self._offset = FIRST

    async def follow(self) -> None:
        async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as http:
            for number in range(1_000):
                with contextlib.suppress(httpx2.TransportError):
                    await self._read(http, self._urls[number % len(self._urls)])
                await asyncio.sleep(0.05)

    async def _read(self, http: httpx2.AsyncClient, url: str) -> None:
        params = {"offset": self._offset, "live": "sse"}
        async with http.stream("GET", f"{url}{AGENT}", params=params) as answer:
            items: list[Json] = []
            if answer.status_code != 200:
                return
            async for line in answer.aiter_lines():
                if line.startswith("data:["):
                    items = json.loads(line.removeprefix("data:"))
                elif line.startswith("data:{"):
                    self.items += items
                    items, self._offset = [], json.loads(line.removeprefix("data:"))["streamNextOffset"]

    def settled(self) -> dict[str, str]:
        ended = [each for each in self.items if each["type"] == "submission_settled"]
        assert len({each["submissionId"] for each in ended}) == len(ended)
        return {each["submissionId"]: each["outcome"] for each in ended}


@contextlib.asynccontextmanager
async def following(stack: Stack) -> AsyncGenerator[Follower]:
    follower = Follower([stack.api_urls[1], stack.api_urls[0]])
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def pages(http: httpx2.AsyncClient, **params: str) -> list[Json]:
    """Everything that is there, page by page."""
    items: list[Json] = []
    offset = FIRST
    while True:
        page = await http.get(AGENT, params={**params, "offset": offset})
        assert page.status_code == 200, page.text
        items += page.json()
        offset = page.headers["stream-next-offset"]
        if "stream-up-to-date" in page.headers:
            return items


async def test_a_reader_gets_each_event_once_whatever_happens_to_its_sessions_and_apis(stack: Stack) -> None:
    async with stack.talk() as talk, following(stack) as follower:
        http = talk.http

        async def prompt(message: str) -> str:
            answer = await http.post(AGENT, json={"message": message})
            assert answer.status_code == 202, answer.text
            return answer.json()["submissionId"]

        said = await prompt("drip 150 words delay 5")
        asked = await prompt('call pay {"amount": 3} then say paid')
        await until(lambda: any("Waiting for people." in str(each) for each in follower.items))
        stack.apis[1].kill()
        [request] = (await http.get("/v1/inputs")).json()["inputs"]
        await http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "approve"})
        await until(lambda: follower.settled().get(asked))
        aborted = await prompt('call pay {"amount": 4} then say paid')
        await until(lambda: str(follower.items).count("Waiting for people.") == 2)
        session_id = request["sessionId"]
        await http.post(f"/eve/v1/session/{session_id}/reset", json={})
        await until(lambda: follower.settled().get(aborted))
        stack.start_api()
        answer = await http.post(f"{AGENT}?wait=result", json={"message": "say again"})
        assert answer.status_code in (200, 202), answer.text
        again = answer.json()
        await until(lambda: follower.settled().get(again["submissionId"]))

        whole = await pages(http)
        await until(lambda: len(follower.items) >= len(whole))
        polled = await pages(http, live="long-poll")

    assert again["result"]["text"] == "again"
    completed = dict.fromkeys((said, asked, again["submissionId"]), "completed")
    assert follower.settled().items() >= {**completed, aborted: "aborted"}.items()
    assert follower.items == whole == polled
