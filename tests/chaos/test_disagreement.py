"""The store and Temporal disagree: one of them has lost something, or an operator has ended something."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol import names
from tests.support import commands
from tests.support.chaos.people import answer, cancel, park, row_of, stopped
from tests.support.chaos.scripts import call, say
from tests.support.chaos.world import Caller, World, kept_types, runner_of, running_world
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
BREAKS_TEMPORAL = True

#: What is missing is noticed within this time, in seconds.
NOTICED = 60.0


@pytest.fixture
def own_world(tmp_path: Path) -> Generator[World]:
    """Most tests break everything, and have a world of their own."""
    with running_world(tmp_path) as world:
        yield world


@pytest.fixture
def calm_world(shared_world: World) -> World:
    """Shared by those that break nothing for the others; it has a worker."""
    if not any(worker.alive for worker in shared_world.stack.workers):
        shared_world.stack.start_worker()
    return shared_world


@pytest.fixture
async def calm_caller(calm_world: World) -> AsyncGenerator[Caller]:
    async with calm_world.caller() as caller:
        yield caller


@pytest.fixture
async def caller(own_world: World) -> AsyncGenerator[Caller]:
    async with own_world.caller() as caller:
        yield caller


def lose_temporal(world: World) -> None:
    """Kill Temporal and everything it knew."""
    server = world.stack.temporal
    server.process.kill()
    for file in server.database.parent.glob(f"{server.database.name}*"):
        file.unlink()
    server.restart()


async def emitted_after(caller: Caller, type: str, before: int) -> list[dict[str, Any]]:
    return await caller.until(type, before, within=NOTICED)


def perdure(world: World, *words: str) -> str:
    done = commands.perdure(*words, environment=world.stack.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Temporal has lost its data -----------------------------------------------------------------------------


async def test_a_session_continues_when_temporal_has_lost_it(own_world: World, caller: Caller) -> None:
    first, second = say(), say()
    assert await caller.say(first.message) == first.answer

    lose_temporal(own_world)

    assert await caller.say(second.message) == second.answer
    types = kept_types(own_world, caller.session_id)
    assert types.count("session.rebuilt") == 1
    assert own_world.times_asked(first.message) == 1
    await own_world.check()


async def test_an_approval_counts_and_is_carried_out_when_temporal_has_lost_the_session(
    own_world: World, caller: Caller
) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)

    lose_temporal(own_world)

    assert (await answer(caller, request_id))["status"] == "answered"
    assert text(await caller.until_boundary(within=NOTICED)) == script.answer
    assert len(own_world.ledger.of_call("pay", script.note)) == 1
    await own_world.check()


async def test_a_turn_continues_where_it_was_when_temporal_has_lost_it(own_world: World, caller: Caller) -> None:
    script = call("charge", gate="after")
    await caller.create(script.message)
    await until(lambda: own_world.ledger.of_call("charge", script.note), "the effect")

    lose_temporal(own_world)
    own_world.ledger.open(script.note)

    # The message of another caller is not needed for that.
    assert text(await caller.until_boundary(within=NOTICED)) == script.answer
    assert len(own_world.ledger.of_call("charge", script.note)) == 1
    assert own_world.times_asked(script.message) == 1
    await own_world.check()


async def test_a_request_expires_though_temporal_has_lost_the_session(own_world: World, caller: Caller) -> None:
    script = call("pay_soon")
    own_world.kill_workers()
    own_world.stack.start_worker()
    (request_id,) = await park(caller, script)

    lose_temporal(own_world)

    await until(lambda: row_of(own_world, request_id)["status"] == "expired", "the expiry", within=NOTICED)
    await own_world.check()


# --- an operator ends something in Temporal -----------------------------------------------------------------


async def test_a_terminated_session_has_ended_and_reports_it(calm_world: World, calm_caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(calm_caller, script)
    client = await calm_world.stack.client()

    await client.get_workflow_handle(calm_caller.session_id).terminate(reason="enough")

    events = await emitted_after(calm_caller, "session.failed", calm_caller.cursor)
    assert events[-1]["data"]["code"] == "SESSION_TERMINATED"
    assert row_of(calm_world, request_id)["status"] == "withdrawn"
    late = await calm_caller.http.post(
        f"/eve/v1/session/{calm_caller.session_id}", json={"continuationToken": calm_caller.token, "message": "hello?"}
    )
    assert (late.status_code, late.json()["code"]) == (409, "session_not_active")
    await calm_world.check()


async def test_what_a_terminated_session_was_sent_is_refused_visibly(calm_world: World, calm_caller: Caller) -> None:
    assert await calm_caller.say((script := say()).message) == script.answer
    client = await calm_world.stack.client()
    await client.get_workflow_handle(calm_caller.session_id).terminate(reason="enough")

    receipt = await calm_caller.send("hello?")

    events = await emitted_after(calm_caller, "session.failed", calm_caller.cursor)
    assert [each["data"]["deliveryId"] for each in events if each["type"] == "delivery.refused"] == [
        receipt["deliveryId"]
    ]
    await calm_world.check()


async def test_a_cancelled_workflow_ends_its_session_and_says_so(own_world: World, caller: Caller) -> None:
    script = call("charge", gate="before")
    await caller.create(script.message)
    await until(lambda: own_world.ledger.reached(script.note), "the tool")
    client = await own_world.stack.client()

    await client.get_workflow_handle(caller.session_id).cancel()

    events = await emitted_after(caller, "session.failed", 0)
    assert [each["type"] for each in events][-3:] == ["turn.cancelled", "session.waiting", "session.failed"]
    assert events[-1]["data"]["code"] == "SESSION_CANCELLED"
    own_world.ledger.open(script.note)


# --- the store has lost something ---------------------------------------------------------------------------


def copy_store(world: World, to: Path) -> None:
    with sqlite3.connect(database(world)) as source, sqlite3.connect(to) as target:
        source.backup(target)


def database(world: World) -> Path:
    return Path(world.stack.settings.database.removeprefix("sqlite:///"))


def restore_store(world: World, copy: Path) -> None:
    world.kill_workers()
    for api in world.stack.apis:
        if api.alive:
            api.kill()
    for file in database(world).parent.glob(f"{database(world).name}*"):
        file.unlink()
    shutil.copy(copy, database(world))
    world.stack.start_api(wait=False)
    world.stack.start_worker()


async def test_a_store_restored_from_an_older_copy_is_noticed_and_the_operator_decides(
    own_world: World, caller: Caller, tmp_path: Path
) -> None:
    one, lost, two, three = say(), say(), say(), say()
    assert await caller.say(one.message) == one.answer
    kept = caller.cursor
    copy_store(own_world, tmp_path / "copy.db")
    assert await caller.say(lost.message) == lost.answer
    await known_to_driver(own_world, caller.session_id, turns=2)

    restore_store(own_world, tmp_path / "copy.db")

    async with own_world.caller(caller) as later:
        await later.send(two.message)
        events = await emitted_after(later, "session.attention", kept)
        assert events[-1]["data"]["code"] == "STORE_BEHIND"
        assert own_world.times_asked(two.message) == 0

        assert "session.rebuilt" in perdure(own_world, "sessions", "repair", later.session_id, "--rebuild")

        events = await emitted_after(later, "session.waiting", events[-1]["meta"]["index"] + 1)
        assert text(events) == two.answer
        later.cursor = events[-1]["meta"]["index"] + 1
        assert await later.say(three.message) == three.answer


async def test_workflows_without_a_session_are_reported_and_ended_by_command(
    own_world: World, caller: Caller, tmp_path: Path
) -> None:
    copy_store(own_world, tmp_path / "empty.db")
    assert await caller.say((script := say()).message) == script.answer

    restore_store(own_world, tmp_path / "empty.db")

    async def listed() -> bool:
        return caller.session_id in perdure(own_world, "sessions", "reconcile")

    async with asyncio.timeout(NOTICED):
        while not await listed():
            await asyncio.sleep(0.2)
    log = own_world.stack.apis[-1].log
    await until(lambda: "belong to no session" in log.read_text(), "a warning of the API", NOTICED)
    # Not one workflow belongs to this store: perhaps it is the wrong one.
    with pytest.raises(AssertionError, match="is it the right one"):
        perdure(own_world, "sessions", "reconcile", "--end-orphans")
    assert "ended" in perdure(own_world, "sessions", "reconcile", "--end-orphans", "--yes")
    client = await own_world.stack.client()
    described = await client.get_workflow_handle(caller.session_id).describe()
    assert described.status is not None
    assert described.status.name == "TERMINATED"


# --- Temporal is there, but not for us ----------------------------------------------------------------------


async def test_an_api_that_cannot_reach_temporal_accepts_and_destroys_nothing(
    calm_world: World, calm_caller: Caller
) -> None:
    script = call("pay")
    (request_id,) = await park(calm_caller, script)
    calm_world.stack.temporal.process.stop()

    receipt = await calm_caller.http.post(
        f"/eve/v1/session/{calm_caller.session_id}",
        json={
            "continuationToken": calm_caller.token,
            "inputResponses": [{"requestId": request_id, "optionId": "approve"}],
        },
    )
    calm_world.stack.temporal.process.cont()

    assert (receipt.status_code, receipt.headers["x-perdure-delayed"]) == (200, "true")
    calm_caller.received(receipt)
    assert text(await calm_caller.until_boundary(within=NOTICED)) == script.answer
    await calm_world.check()


async def test_a_stalled_temporal_loses_nothing_of_what_was_accepted(calm_world: World) -> None:
    scripts = [say() for _ in range(12)]
    calm_world.stack.temporal.process.stop()

    async def insistent(number: int) -> Caller:
        """Gives up after two seconds, and repeats the request under its key."""
        caller = calm_world.caller()
        key = {"idempotency-key": f"start-{number}"}
        body = {"message": scripts[number].message}
        first = asyncio.create_task(caller.http.post("/eve/v1/session", json=body, headers=key))
        await asyncio.wait([first], timeout=2)
        again = asyncio.create_task(caller.http.post("/eve/v1/session", json=body, headers=key))
        receipts = [caller.received(each) for each in await asyncio.gather(first, again)]
        assert receipts[0] == receipts[1]
        caller.session_id, caller.token = receipts[0]["sessionId"], receipts[0]["continuationToken"]
        return caller

    asking = [asyncio.create_task(insistent(number)) for number in range(len(scripts))]
    await asyncio.sleep(6)
    calm_world.stack.temporal.process.cont()

    for caller, script in zip(await asyncio.gather(*asking), scripts, strict=True):
        assert text(await caller.until_boundary(within=NOTICED)) == script.answer
        await caller.http.aclose()
    assert [calm_world.times_asked(script.message) for script in scripts] == [1] * len(scripts)
    await calm_world.check()


# --- a worker that serves other agents ----------------------------------------------------------------------


async def test_a_worker_with_other_agents_hands_back_what_it_cannot_serve(own_world: World) -> None:
    own_world.stack.start_worker({"PERDURE_AGENTS": "perdure.agents.demo:agent"})
    callers = [own_world.caller() for _ in range(10)]
    scripts = [call("put") for _ in callers]

    answers = await asyncio.gather(
        *(caller.say(script.message) for caller, script in zip(callers, scripts, strict=True))
    )

    assert answers == [script.answer for script in scripts]
    for caller in callers:
        await caller.http.aclose()
    await own_world.check()


# --- a cancel outlives its worker ---------------------------------------------------------------------------


async def test_a_cancel_holds_when_the_worker_comes_back_late(own_world: World, caller: Caller) -> None:
    script = call("put", gate="before")
    await caller.create(script.message)
    await until(lambda: own_world.ledger.reached(script.note), "the tool")
    own_world.kill_workers()

    assert await cancel(caller) == "accepted"
    # Longer than a worker that says nothing is waited for.
    await attempt_timed_out(own_world, caller.session_id)
    own_world.stack.start_worker()

    await stopped(own_world, caller, within=NOTICED)
    own_world.ledger.open(script.note)
    assert own_world.ledger.of_call("put", script.note) == []
    types = kept_types(own_world, caller.session_id)
    assert ("turn.failed" in types, types.count("turn.cancelled")) == (False, 1)
    await own_world.check()


async def known_to_driver(world: World, session_id: str, turns: int) -> None:
    """Wait until the driver knows that so many turns have ended: readers know it before."""
    driver = (await world.stack.client()).get_workflow_handle(session_id)
    async with asyncio.timeout(NOTICED):
        while (await driver.query(names.DESCRIBE))["turn"] < turns:
            await asyncio.sleep(0.02)


async def attempt_timed_out(world: World, session_id: str) -> None:
    """Wait until Temporal has given up the attempt of the worker that died."""
    turn = await runner_of(world, session_id, 0)
    async with asyncio.timeout(NOTICED):
        while (await turn.describe()).raw_description.pending_activities[0].attempt < 2:
            await asyncio.sleep(0.1)
