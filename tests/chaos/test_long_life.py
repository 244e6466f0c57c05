"""One session over very many turns, with a deployment and a `kill -9` of its worker now and then.

At full length: `PERDURE_LIFE_TURNS=2000 PERDURE_LIFE_DEPLOY=200 PERDURE_LIFE_KILL=100`.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from statistics import median

import httpx2
import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.processes import Process
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(7200)]

TURNS = int(os.environ.get("PERDURE_LIFE_TURNS", "200"))
DEPLOY_EVERY = int(os.environ.get("PERDURE_LIFE_DEPLOY", "50"))
KILL_EVERY = int(os.environ.get("PERDURE_LIFE_KILL", "25"))
log = logging.getLogger(__name__)


class Builds:
    """The workers of one deployment; each build has one worker."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._number = 0
        self.worker: Process | None = None

    async def deploy(self) -> None:
        """Start the next build, make it current, move the session to it, and stop the build before."""
        before, old = self.worker, f"v{self._number}"
        self._number += 1
        await self.start()
        await self._perdure("promote", f"v{self._number}")
        if before is not None:
            await self._perdure("drain", old)
            assert before.terminate() == 0

    async def start(self) -> None:
        environment = {"PERDURE_BUILD_ID": f"v{self._number}"}
        self.worker = self._stack.start_worker(environment, wait=False)
        while not self._stack.serves(self.worker):
            assert self.worker.alive, self.worker.output
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        await self.start()

    async def _perdure(self, *words: str) -> None:
        done = await asyncio.to_thread(commands.perdure, "deploy", *words, environment=self._stack.environment)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_no_turn_is_lost_or_doubled(
    make_stack: StackFactory, request: pytest.FixtureRequest, database: str
) -> None:
    url = request.getfixturevalue("postgres_url") if database == "postgres" else None
    environment = {"PERDURE_MODEL": "openai-chat:scripted", "PERDURE_DEPLOYMENT": "life"}
    stack = make_stack(workers=0, provider=True, environment=environment, database_url=url)
    builds = Builds(stack)
    await builds.deploy()
    answers: list[str] = []
    seconds: list[float] = []

    async with stack.talk() as talk:
        for turn in range(TURNS):
            began, disturbance = time.monotonic(), disturbance_of(turn)
            message = "drip 20 words delay 20" if disturbance else f"say answer {turn}"
            await (talk.send(message) if turn else talk.create(message))
            if disturbance == "deploy":
                await builds.deploy()
            elif disturbance == "kill":
                await builds.kill()
            answers.append(text(await talk.until_boundary(within=120)))
            if not disturbance:
                seconds.append(time.monotonic() - began)
        events = await everything(talk)
        count = await provider_count(stack)

    disturbed = [turn for turn in range(TURNS) if disturbance_of(turn)]
    expected = [
        "".join(f"w{word} " for word in range(20)) if turn in disturbed else f"answer {turn}" for turn in range(TURNS)
    ]
    assert answers == expected
    assert [event["meta"]["index"] for event in events] == list(range(talk.cursor))
    started = [event["data"]["turnId"] for event in events if event["type"] == "turn.started"]
    assert started == [f"turn_{turn}" for turn in range(TURNS)]
    completed = Counter(event["data"]["turnId"] for event in events if event["type"] == "turn.completed")
    assert set(completed.values()) == {1}
    # A call that had no reply yet when its worker died or was stopped is repeated, and no other.
    assert count["total"] - count["distinct"] <= len(disturbed)
    part = max(1, len(seconds) // 10)
    first, last = median(seconds[:part]), median(seconds[-part:])
    log.info("%d turns: p50 %.0f ms at first, %.0f ms at last", TURNS, 1e3 * first, 1e3 * last)


def disturbance_of(turn: int) -> str:
    """What happens while this turn runs."""
    if turn % DEPLOY_EVERY == DEPLOY_EVERY - 1:
        return "deploy"
    return "kill" if turn % KILL_EVERY == KILL_EVERY - 1 else ""


async def everything(talk: Talk) -> list[Json]:
    """The whole stream again, from its beginning."""
    events: list[Json] = []
    stream = talk.events()
    async for event in stream:
        events.append(event)
        if len(events) == talk.cursor:
            break
    await stream.aclose()
    return events


async def provider_count(stack: Stack) -> dict[str, int]:
    async with httpx2.AsyncClient(verify=False) as http:
        return (await http.get(f"{stack.provider_url}/count")).json()
