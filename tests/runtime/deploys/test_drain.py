"""`perdure deploy drain`: parked sessions move to the current build, and nothing else changes."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from perdure.protocol import names
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome
from perdure.protocol.wire import JsonObject
from perdure.session import state
from perdure.session.state import Chain
from tests.support.fleet import Fleet, Operator, build_of
from tests.support.fleet import fleet as fleet
from tests.support.fleet import operator as operator
from tests.support.workflows import Bench, Driven, Outside, wait_beating
from tests.support.workflows import bench as bench


async def parked_sessions(bench: Bench, outside: Outside, count: int) -> list[Driven]:
    """Sessions that have run a turn and wait."""
    sessions = [await bench.start(outside) for _ in range(count)]
    for number, session in enumerate(sessions):
        await session.deliver(f"dlv_{number}")
    await outside.until(lambda: len(outside.consumed) == count, within=60)
    for session in sessions:
        while not (await session.handle.query(names.DESCRIBE))["idle"]:
            await asyncio.sleep(0.02)
    return sessions


async def builds_of(bench: Bench, sessions: Sequence[Driven]) -> list[str]:
    return [await build_of(bench.client, session.handle.id) for session in sessions]


async def described(session: Driven) -> JsonObject:
    return await session.handle.query(names.DESCRIBE)


async def test_parked_sessions_move_and_are_otherwise_unchanged(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    first, second = Outside(), Outside()
    async with fleet.current("v1", first):
        sessions = await parked_sessions(bench, first, 12)
        # Open requests are no reason to stay.
        waiting = await bench.start(first, open=[OpenInput(request_id="inp_1")])
        before = [await described(session) for session in (*sessions, waiting)]
        async with fleet.current("v2", second):
            refused = await operator.runs("drain", "v2")
            said = await operator.says("drain", "v1")
            again = await operator.says("drain", "v1")
            builds = await builds_of(bench, [*sessions, waiting])
            after = [await described(session) for session in (*sessions, waiting)]

    assert refused.stderr == "perdure: New sessions start on build v2: promote another one first.\n"
    assert said[-2:] == ["13 sessions have left build v1.", "Nothing is left on build v1: its workers may stop."]
    assert again == ["0 sessions have left build v1.", "Nothing is left on build v1: its workers may stop."]
    assert builds == ["v2"] * 13
    assert after == before
    assert second.model_calls == []


@pytest.mark.parametrize(
    ("bench", "reason"),
    [("child", "its turn runs on the old build"), ("inline", "it runs a turn, and moves after it")],
    indirect=["bench"],
)
async def test_a_session_that_runs_a_turn_is_named_and_moves_after_it(
    bench: Bench, fleet: Fleet, operator: Operator, reason: str
) -> None:
    first, second = Outside(), Outside()
    inside, release = asyncio.Event(), asyncio.Event()

    async def waits(call: ModelCall) -> ModelOutcome:
        inside.set()
        await wait_beating(release)
        return Finished()

    async with fleet.current("v1", first):
        (parked,) = await parked_sessions(bench, first, 1)
        first.answer = waits
        busy = await bench.start(first)
        await busy.deliver("dlv_busy")
        await inside.wait()
        async with fleet.current("v2", second):
            stays = await operator.runs("drain", "v1", "--wait", "3")
            release.set()
            moves = await operator.says("drain", "v1")
            builds = await builds_of(bench, [parked, busy])

    assert stays.returncode == 1
    assert f"{busy.handle.id}  {reason}" in stays.stdout
    assert stays.stderr == "perdure: 1 sessions are still on build v1; keep its workers.\n"
    assert moves[-1] == "Nothing is left on build v1: its workers may stop."
    assert builds == ["v2", "v2"]


async def test_sessions_without_a_worker_stay_until_the_current_build_takes_them_over(
    bench: Bench, fleet: Fleet, operator: Operator
) -> None:
    first, second = Outside(), Outside()
    async with fleet.build("v2", second):
        async with fleet.current("v1", first):
            sessions = await parked_sessions(bench, first, 3)
            await fleet.make_current("v2")
        await sessions[0].deliver("dlv_late")
        stays = await operator.runs("drain", "v1")
        moves = await operator.says("drain", "v1", "--take-over")
        await second.until(lambda: second.consumed == ["dlv_late"])
        builds = await builds_of(bench, sessions)

    assert stays.returncode == 1
    assert stays.stdout.count("no worker of its build runs: start one, or add --take-over") == 3
    assert moves[-2] == "3 sessions have left build v1."
    assert builds == ["v2"] * 3


async def test_no_session_moves_to_a_build_without_workers(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    first = Outside()
    async with fleet.current("v1", first):
        (session,) = await parked_sessions(bench, first, 1)
        async with fleet.current("v2", Outside()):
            pass
        refused = await operator.runs("drain", "v1")

        assert refused.stderr == (
            "perdure: No worker of build v2 takes sessions, and it is the current one. Start one.\n"
        )
        assert await build_of(bench.client, session.handle.id) == "v1"


async def test_no_session_moves_to_a_build_that_cannot_read_it(
    bench: Bench, fleet: Fleet, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Outside()
    async with fleet.build("v1", Outside()), fleet.current("v2", outside):
        await operator.announce("v1")
        (session,) = await parked_sessions(bench, outside, 1)
        monkeypatch.setattr(state, "SESSION", Chain("session state", [dict]))
        await operator.announce("v2")
        await fleet.make_current("v1")
        refused = await operator.runs("drain", "v2")

        assert refused.returncode == 1
        assert "it writes session state of version 2 (it reads 1), build v1." in refused.stderr
        assert await build_of(bench.client, session.handle.id) == "v2"


@pytest.mark.slow
async def test_two_hundred_parked_sessions_are_drained(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    first, second = Outside(), Outside()
    async with fleet.build("v2", second):
        async with fleet.current("v1", first):
            sessions = await parked_sessions(bench, first, 200)
            await fleet.make_current("v2")
            began = time.monotonic()
            said = await operator.says("drain", "v1", "--rate", "50")
            took = time.monotonic() - began
        # The workers of the old build are gone.
        for number, session in enumerate(sessions):
            await session.deliver(f"dlv_again_{number}")
        await second.until(lambda: len(second.consumed) == 200, within=120)

    assert said[-2:] == ["200 sessions have left build v1.", "Nothing is left on build v1: its workers may stop."]
    # The rate is a bound, and the list of progress has a line every two seconds.
    assert took >= 199 / 50
    assert any("moved," in line for line in said)
