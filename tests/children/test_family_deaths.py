"""Families whose processes die: each child is started once, and each result is read once."""

import asyncio
import random
from pathlib import Path

import httpx2
import pytest

from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import Rebuild
from tests.support.chaos.evidence import read_store
from tests.support.chaos.world import unique
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until

from .test_family_inputs import PAY, approve, requests_in
from .test_subagents import hand, of_type

pytestmark = pytest.mark.chaos


def a_stack(directory: Path, turns: str) -> Stack:
    agents = "tests.children.agents:agents"
    return Stack(directory, provider=True, agents=agents, environment={"PERDURE_TURNS": turns})


async def until_boundary(stack: Stack, talk: Talk) -> list[Json]:
    """The events to the next boundary, over whichever API lives."""
    events: list[Json] = []
    while True:
        living = [url for url, api in zip(stack.api_urls, stack.apis, strict=True) if api.alive]
        reader = Talk(living[-1])
        reader.session_id, reader.cursor = talk.session_id, talk.cursor
        async with reader:
            try:
                events += await reader.until_boundary()
            except httpx2.TransportError:
                # The API has died while we read.
                await asyncio.sleep(0.1)
                continue
            talk.cursor = reader.cursor
            return events


def kill(stack: Stack, what: str) -> None:
    """Kill one process, and start it again."""
    match what:
        case "worker":
            stack.workers[-1].kill()
            stack.start_worker()
        case "api":
            stack.apis[-1].kill()
            stack.start_api()
        case _:
            stack.restart_temporal()


async def survives(stack: Stack, what: str, pause: float) -> None:
    """A turn with three children ends as it should although a process dies meanwhile."""
    notes = [unique() for _ in range(3)]
    async with stack.talk(len(stack.apis) - 1) as talk:
        tasks = [("clerk", f"drip 8 words delay 30 {note}") for note in notes]
        await talk.create(hand(*tasks) + " then say Done")
        await asyncio.sleep(pause)
        await asyncio.to_thread(kill, stack, what)

        events = await until_boundary(stack, talk)

        assert text(events) == "Done"
        called, results = of_type(events, "subagent.called"), of_type(events, "action.result")
        assert len({each["childSessionId"] for each in called}) == len(called) == 3
        assert [each["status"] for each in results] == ["completed"] * 3
        assert len({each["result"]["callId"] for each in results}) == 3
        kept = read_store(stack.settings.database)
        for each in called:
            assert types(list(kept.events[each["childSessionId"]])).count("session.completed") == 1


def is_of_many(turns: str, what: str) -> bool:
    return turns == "inline" and what != "worker"


@pytest.mark.slow_where.with_args(is_of_many)
@pytest.mark.parametrize("turns", ["child", "inline"])
@pytest.mark.parametrize("what", ["worker", "api", "temporal"])
async def test_a_family_survives_a_death(tmp_path: Path, turns: str, what: str) -> None:
    with a_stack(tmp_path, turns) as stack:
        await survives(stack, what, 0.4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("turns", ["child", "inline"])
async def test_a_family_survives_twenty_deaths_at_random_moments(tmp_path: Path, turns: str) -> None:
    chance = random.Random(turns)
    with a_stack(tmp_path, turns) as stack:
        for _ in range(20):
            await survives(stack, chance.choice(["worker", "api", "temporal"]), chance.uniform(0.0, 1.0))


@pytest.mark.parametrize("waits", ["for its children", "for people"])
async def test_a_family_goes_on_after_the_driver_of_its_root_was_lost(tmp_path: Path, waits: str) -> None:
    task = "drip 60 words delay 50" if waits == "for its children" else PAY
    with a_stack(tmp_path, "child") as stack:
        async with stack.talk() as talk:
            await talk.create(hand(("clerk", task)) + " then say Done")
            before = await talk.until("subagent.called" if waits == "for its children" else "session.waiting")
            client = await stack.client()
            await client.get_workflow_handle(talk.session_id).terminate("lost")
            driver = DriverClient(client, stack.settings.task_queue)
            await driver.rebuild(talk.session_id, Rebuild(reason="WORKFLOW_LOST"))
            if waits == "for people":
                talk.cursor = len(before)
                await until(lambda: "session.rebuilt" in kept_types(stack, talk), "the rebuild to be told")
                await talk.send(inputResponses=approve(*requests_in(before)))
            events = await talk.until_boundary()

            assert text(events) == "Done"
            kept = kept_types(stack, talk)
            assert [kept.count(each) for each in ("subagent.called", "subagent.completed", "action.result")] == [
                1,
                1,
                1,
            ]


def kept_types(stack: Stack, talk: Talk) -> list[str]:
    return types(list(read_store(stack.settings.database).events[talk.session_id]))
