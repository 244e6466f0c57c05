"""A worker is frozen past its heartbeat, another one finishes, and the first one wakes up."""

from collections.abc import Sequence

import pytest

from tests.support.chaos.evidence import Evidence, Json
from tests.support.chaos.scripts import Script, call, drip
from tests.support.chaos.world import Caller, World, kept_types, reported
from tests.support.talk import text
from tests.support.waiting import until

# A frozen worker still has polls at the server, and each task that goes to one of them is lost for a heartbeat.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


async def test_a_frozen_worker_that_wakes_up_writes_nothing(world: World) -> None:
    """One freeze for all: a model that streams, tools before their effect and after it."""
    streaming = drip(words=60, delay=40)
    before = {tool: call(tool, gate="before") for tool in ("charge", "charge_in_thread", "put")}
    after = call("charge", gate="after")
    scripts = [streaming, after, *before.values()]
    zombie = world.only_worker()
    callers = [await begun(world, script) for script in scripts]

    zombie.stop()
    world.stack.start_worker()
    # Of an idempotent tool the other worker makes a new attempt, which has to pass the gate too.
    world.ledger.open(before["put"].note)
    events = [await caller.until_boundary() for caller in callers]
    kept = await world.settled()
    for script in scripts:
        world.ledger.open(script.note)
    zombie.cont()
    assert zombie.terminate() == 0, zombie.output

    assert [text(each) for each in events] == [script.answer for script in scripts]
    assert [reported(each) for each in events[1:]] == ["unknown", "unknown", "unknown", "completed"]
    assert_untouched(kept, world.store())
    # Whether the one that woke up acted is a matter of chance: its reported outcome, unknown, is true either way.
    assert [effects(world, "charge", after), effects(world, "put", before["put"])] == [1, 1]
    assert all(effects(world, tool, before[tool]) <= 1 for tool in ("charge", "charge_in_thread"))


async def test_a_worker_that_a_tool_blocks_loses_what_it_does(world: World) -> None:
    """It sends no heartbeat, and it does not learn in time that others have taken over: the store must refuse it."""
    streaming, blocking = drip(words=40, delay=40), call("charge_blocking", gate="before")
    blocked = world.only_worker()
    callers = [await begun(world, streaming), await begun(world, blocking)]

    world.stack.start_worker()
    events = [await caller.until_boundary() for caller in callers]
    kept = await world.settled()
    world.ledger.open(blocking.note)
    await until(lambda: effects(world, "charge_blocking", blocking), "the blocked tool to act")
    assert blocked.terminate() == 0, blocked.output

    assert [text(each) for each in events] == [streaming.answer, blocking.answer]
    assert reported(events[1]) == "unknown"
    assert effects(world, "charge_blocking", blocking) == 1
    assert_untouched(kept, world.store())


async def begun(world: World, script: Script) -> Caller:
    """Start a session and wait until it is in the middle."""
    caller = world.caller()
    await caller.create(script.message)
    if script.note:
        await until(lambda: world.ledger.reached(script.note), "the tool to be at its gate")
    else:
        await until(lambda: "message.appended" in kept_types(world, caller.session_id), "the model to stream")
    return caller


def effects(world: World, tool: str, script: Script) -> int:
    return len(world.ledger.of_call(tool, script.note))


def assert_untouched(before: Evidence, now: Evidence) -> None:
    """What a worker has paid a model for is counted, also when it wakes up late. Nothing else may change."""
    assert now.events == before.events
    assert [without_usage(each) for each in now.records.values()] == [
        without_usage(each) for each in before.records.values()
    ]
    assert list(map(unpaid, now.sessions)) == list(map(unpaid, before.sessions))


def without_usage(records: Sequence[Json]) -> list[Json]:
    return [record for record in records if not record["slot"].startswith("usage/")]


def unpaid(session: Json) -> Json:
    return {name: value for name, value in session.items() if not name.endswith("_tokens") and name != "updated_at"}
