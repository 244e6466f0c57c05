"""What is reported of attempts whose workers die or freeze, or whose provider refuses: exactly what has happened."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from perdure.protocol.events import Usage
from perdure.protocol.wire import JsonObject
from perdure.runtime.reports.attempts import lease
from perdure.store.attempts import AttemptQuery, AttemptRow
from perdure.store.base import Store
from tests.support.chaos.evidence import Json
from tests.support.chaos.scripts import call, drip
from tests.support.chaos.world import Caller, World, kept_types, unique
from tests.support.processes import Process
from tests.support.script import plan
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@asynccontextmanager
async def opened(world: World) -> AsyncGenerator[Store]:
    store = await world.stack.store()
    try:
        yield store
    finally:
        await store.close()


async def attempts(world: World, session_id: str) -> list[AttemptRow]:
    async with opened(world) as store:
        return [*(await store.attempts.list(AttemptQuery(session_id))).attempts]


async def leases(world: World) -> list[JsonObject]:
    async with opened(world) as store:
        return [lease(each) for each in (await store.attempts.leases(100)).attempts]


def ends(rows: list[AttemptRow]) -> list[tuple[int, int, str, str | None]]:
    """The step, the number, the end and why, of each attempt at the model."""
    return [
        (each.key.step, each.number, each.status, (each.error or {}).get("type"))
        for each in rows
        if each.key.scope == "model"
    ]


def counted(message: str, *rounds: int) -> Usage:
    """What the provider counts for these replies."""
    plans = [plan(message, each, "") for each in rounds]
    return sum(
        (Usage(input_tokens=each.prompt_tokens, output_tokens=len(each.words) + 5 * len(each.calls)) for each in plans),
        Usage(),
    )


def used(rows: list[AttemptRow]) -> Usage:
    return sum((each.usage for each in rows), Usage())


def is_by(row: AttemptRow, worker: Process) -> bool:
    return row.worker.split(":")[1:] == [str(worker.pid), "unversioned"]


async def begun(world: World, message: str, note: str = "") -> Caller:
    """A session in the middle of its turn."""
    caller = world.caller()
    await caller.create(message)
    if note:
        await until(lambda: world.ledger.reached(note), "the tool to be at its gate")
    else:
        await until(lambda: "message.appended" in kept_types(world, caller.session_id), "a piece of the answer")
    return caller


async def test_a_killed_worker_leaves_a_superseded_attempt_and_that_of_the_next_worker(world: World) -> None:
    script = drip(words=60, delay=40)
    dead = world.only_worker()
    caller = await begun(world, script.message)

    dead.kill()
    other = world.stack.start_worker()
    assert text(await caller.until_boundary()) == script.answer

    first, second = await attempts(world, caller.session_id)
    assert [is_by(first, dead), is_by(second, other)] == [True, True]
    assert ends([first, second]) == [(0, 1, "superseded", "LEASE_EXPIRED"), (0, 2, "succeeded", None)]
    assert first.error == {"type": "LEASE_EXPIRED", "message": f"lease expired; taken over by {second.worker}"}
    # What the dead one was charged for is not known.
    assert [first.usage, second.usage] == [Usage(), counted(script.message, 0)]


async def test_the_lease_of_a_frozen_worker_expires_before_another_one_takes_over(world: World) -> None:
    script = call("put", gate="before")
    frozen = world.only_worker()
    caller = await begun(world, script.message, script.note)

    frozen.stop()
    world.stack.start_worker()
    world.ledger.open(script.note)
    assert text(await caller.until_boundary()) == script.answer
    rows = await attempts(world, caller.session_id)
    frozen.cont()
    assert frozen.terminate() == 0, frozen.output

    first, second = (each for each in rows if each.key.scope.startswith("call/"))
    assert (first.status, second.status) == ("superseded", "succeeded")
    assert first.lease_expires_at < second.started_at
    assert ends(rows) == [(0, 1, "succeeded", None), (1, 1, "succeeded", None)]
    # A worker that wakes up changes nothing of that.
    assert await attempts(world, caller.session_id) == rows
    assert used(rows) == counted(script.message, 0, 1)


async def test_a_frozen_worker_holds_an_overdue_lease_while_there_is_no_other(world: World) -> None:
    script = call("put", gate="before")
    frozen = world.only_worker()
    caller = await begun(world, script.message, script.note)
    [held] = await leases(world)
    assert (held["sessionId"], held["overdue"]) == (caller.session_id, False)

    frozen.stop()
    found: list[JsonObject] = []

    async def is_overdue() -> bool:
        found[:] = await leases(world)
        return found[0]["overdue"]

    await until(is_overdue, "the lease to be overdue")
    assert datetime.fromisoformat(found[0]["leaseExpiresAt"]) < datetime.now().astimezone()
    world.ledger.open(script.note)
    frozen.cont()
    assert text(await caller.until_boundary()) == script.answer
    await until(lambda: _none_works(world), "all attempts to end")


async def _none_works(world: World) -> bool:
    return await leases(world) == []


async def test_a_worker_that_works_for_long_is_not_overdue(world: World) -> None:
    """Its lease is noted again and again: it lasts longer than that with which it began."""
    script = call("put", gate="before")
    world.only_worker()
    caller = await begun(world, script.message, script.note)
    [held] = await leases(world)
    seen: list[JsonObject] = []

    async def is_renewed_twice() -> bool:
        [now] = await leases(world)
        if now["leaseExpiresAt"] != (seen[-1] if seen else held)["leaseExpiresAt"]:
            seen.append(now)
        assert not now["overdue"]
        return len(seen) == 2

    await until(is_renewed_twice, "the lease to be renewed twice")
    world.ledger.open(script.note)
    assert text(await caller.until_boundary()) == script.answer

    first, second = (datetime.fromisoformat(each["leaseExpiresAt"]) for each in seen)
    # At most every five seconds.
    assert (second - first).total_seconds() > 4


async def test_a_provider_that_answers_503_leaves_one_failed_attempt_for_each_refusal(world: World) -> None:
    word = unique()
    message = f"fail 503 times 2; say {word}"
    world.only_worker()
    caller = world.caller()

    await caller.create(message)
    events: list[Json] = await caller.until_boundary()

    rows = await attempts(world, caller.session_id)
    assert text(events) == word
    assert ends(rows) == [
        (0, 1, "failed", "MODEL_CALL_FAILED"),
        (0, 2, "failed", "MODEL_CALL_FAILED"),
        (0, 3, "succeeded", None),
    ]
    assert all("answered 503" in (each.error or {})["message"] for each in rows[:2])
    assert used(rows) == counted(message, 0)
    assert world.times_asked(message) == 3
