"""PostgreSQL, two workers, two APIs: when one of a kind dies, the other one continues."""

import asyncio
import random
from pathlib import Path

import psycopg
import pytest

from tests.support.chaos.evidence import Json
from tests.support.chaos.scripts import Script, call, drip, say
from tests.support.chaos.world import World, dies_at, reported
from tests.support.talk import text
from tests.support.waiting import until

from .retrying_caller import RetryingCaller

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(400)]

#: As in `test_killed_workers`, the places that matter most: effects of an at-most-once tool and what its call is
#: reported as, and how often the model is asked.
TOOL = {
    "tool_after_intent": (0, "unknown"),
    "tool_after_effect": (1, "unknown"),
}
MODEL = {
    "model_mid_stream": 2,
    "model_after_settle": 1,
}


@pytest.mark.slow
async def test_the_tables_hold_on_postgresql(shared_out: World, tmp_path: Path) -> None:
    """One after another; of two workers that would die at the same place, only the first one there does."""
    world = shared_out
    for point, (count, status) in TOOL.items():
        script = call("charge")
        events = await turn_with_a_death(world, script, point, tmp_path)
        assert (point, len(world.ledger.of_call("charge", script.note)), reported(events)) == (point, count, status)
    for point, asked in MODEL.items():
        script = drip()
        events = await turn_with_a_death(world, script, point, tmp_path)
        assert (point, text(events), world.times_asked(script.message)) == (point, script.answer, asked)


async def turn_with_a_death(world: World, script: Script, point: str, directory: Path) -> list[Json]:
    """Two workers that would die at the same place; the first one that gets there does."""
    world.kill_workers()
    doomed = dies_at(point, directory / point)
    workers = [world.stack.start_worker(doomed, wait=False), world.stack.start_worker(doomed)]
    async with world.caller() as caller:
        await caller.create(script.message)
        await until(lambda: not all(worker.alive for worker in workers), f"a worker to die at {point}")
        events = await caller.until_boundary()
        following = say()
        assert await caller.say(following.message) == following.answer
    return events


async def test_clients_notice_nothing_but_a_pause(shared_out: World) -> None:
    """Eight sessions under way; a worker, an API, all connections of the database and Temporal go, one by one."""
    world, chance = shared_out, random.Random(4)
    world.stack.start_worker(wait=False)
    world.stack.start_worker()
    clients = [RetryingCaller(world, chance) for _ in range(8)]

    async with asyncio.TaskGroup() as group:
        talks = [group.create_task(talk(client, chance)) for client in clients]
        await progress(world, 8)
        world.stack.workers[0].kill()
        world.stack.start_worker(wait=False)
        await progress(world, 16)
        world.stack.apis[0].kill()
        world.stack.start_api(wait=False)
        await progress(world, 20)
        cut_connections(world)
        await progress(world, 24)
        world.stack.restart_temporal()

    for task in talks:
        said, answered = task.result()
        assert answered == said


async def talk(client: RetryingCaller, chance: random.Random) -> tuple[list[str], list[str]]:
    """A few turns of all kinds; what the model was to say, and what it said."""
    scripts = [say(), drip(words=30), call("charge"), call("put"), call("look"), say()]
    chance.shuffle(scripts)
    return [script.answer for script in scripts], [await client.say(script.message) for script in scripts]


async def progress(world: World, turns: int) -> None:
    """Wait until so many turns have begun."""
    await until(lambda: sum(session["turns"] for session in world.store().sessions) >= turns, f"{turns} turns", 120)


def cut_connections(world: World) -> None:
    with psycopg.connect(world.stack.settings.database, autocommit=True) as database:
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
