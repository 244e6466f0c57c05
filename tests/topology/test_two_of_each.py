"""The deployment's shape as processes: two workers, two APIs, one PostgreSQL. Nothing relies on being alone."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text

pytestmark = [pytest.mark.postgres, pytest.mark.chaos]


@pytest.fixture
def topology(make_stack: StackFactory, postgres_url: str) -> Stack:
    return make_stack(workers=2, apis=2, database_url=postgres_url)


async def test_a_session_outlives_one_worker_and_one_api(topology: Stack) -> None:
    async with topology.talk(0) as first, topology.talk(1) as second:
        assert "one" in await first.say("one")
        follow(second, first)

        topology.workers[0].kill()
        topology.apis[0].kill()

        assert "two" in await second.say("two")
        events = [event async for event in until(second, turns=2)]
    assert [event["meta"]["index"] for event in events] == list(range(len(events)))


async def test_a_reader_at_one_api_reads_what_the_other_accepted(topology: Stack) -> None:
    async with topology.talk(0) as speaker, topology.talk(1) as reader:
        await speaker.say("one")
        follow(reader, speaker)
        reading = asyncio.create_task(reader.until_boundary())

        await speaker.send("two")

        assert "two" in text(await reading)


def follow(reader: Talk, speaker: Talk) -> None:
    """Let the reader join the speaker's session where the caller is."""
    reader.session_id, reader.token, reader.cursor = speaker.session_id, speaker.token, speaker.cursor


async def until(talk: Talk, turns: int) -> AsyncGenerator[Json]:
    """All events of the session's first turns."""
    async for event in talk.events():
        yield event
        turns -= event["type"] == "session.waiting"
        if turns == 0:
            return
