"""A driver stays on the build that started it; each turn starts on the newest one."""

import asyncio

import pytest
from temporalio import workflow

from perdure.protocol import names
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Finished,
    ModelCall,
    ModelOutcome,
    ToolCall,
    TurnRequest,
    TurnResult,
)
from perdure.session.turn import ContinueAsNew, run_turn
from tests.support.fleet import Fleet, build_of
from tests.support.fleet import fleet as fleet
from tests.support.processes import PATIENCE
from tests.support.workflows import Bench, Outside, wait_beating
from workflows.turn import ActivitySteps


@workflow.defn(name=names.TURN_WORKFLOW, sandboxed=False)
class NewerTurn:
    """The next build's turn: it signs its model calls."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        end = await run_turn(request.model_copy(update={"agent": "newer"}), ActivitySteps())
        assert not isinstance(end, ContinueAsNew)
        return end


async def works(call: ModelCall) -> ModelOutcome:
    """Ask for a tool in the first step, and end with the second."""
    if call.at.step == 0:
        return Calls(calls=(CallRef(call_id=f"call_{call.at.turn}", tool="work"),))
    return Finished()


def working() -> Outside:
    outside = Outside()
    outside.answer = works
    return outside


@pytest.mark.parametrize("bench", ["child"], indirect=True)
async def test_a_pinned_driver_runs_its_turns_on_the_newest_build(bench: Bench, fleet: Fleet) -> None:
    first, second = Outside(), Outside()
    async with fleet.current("1", first):
        session = await bench.start(first)
        await session.deliver("dlv_1")
        await session.consumed("dlv_1")

        async with fleet.current("2", second, NewerTurn):
            await session.deliver("dlv_2")
            await second.until(lambda: second.consumed == ["dlv_2"])

            assert [call.agent for call in second.model_calls] == ["newer"]
            assert await build_of(bench.client, names.turn_workflow(session.handle.id, 1)) == "2"


async def test_a_parked_driver_moves_to_the_newest_build_between_two_turns(bench: Bench, fleet: Fleet) -> None:
    first, second = Outside(), Outside()
    async with fleet.current("1", first):
        session = await bench.start(first)
        await session.deliver("dlv_1")
        await session.consumed("dlv_1")
        assert await build_of(bench.client, session.handle.id) == "1"

        async with fleet.current("2", second, NewerTurn):
            await session.deliver("dlv_2")
            await session.deliver("dlv_1")
            await session.deliver("dlv_3")
            await second.until(lambda: second.consumed == ["dlv_2", "dlv_3"])

            assert first.consumed == ["dlv_1"]
            assert await build_of(bench.client, session.handle.id) == "2"


async def test_the_work_of_a_new_turn_is_done_by_the_newest_build_alone(bench: Bench, fleet: Fleet) -> None:
    first, second = working(), working()
    async with fleet.current("1", first), fleet.current("2", second):
        sessions = [await bench.start(second) for _ in range(10)]

        for session in sessions:
            await session.deliver("dlv_1")
        await second.until(lambda: len(second.model_calls) == 20)

        assert len(second.tool_calls) == 10
        assert (first.model_calls, first.tool_calls) == ([], [])


@pytest.mark.parametrize("bench", ["child"], indirect=True)
async def test_a_turn_ends_on_its_build_and_so_does_its_work(bench: Bench, fleet: Fleet) -> None:
    first, second = working(), working()
    inside, release = asyncio.Event(), asyncio.Event()

    async def waits(call: ToolCall) -> None:
        inside.set()
        await wait_beating(release)

    first.act = waits
    async with fleet.current("1", first):
        session = await bench.start(first)
        await session.deliver("dlv_1")
        await asyncio.wait_for(inside.wait(), PATIENCE)

        async with fleet.current("2", second):
            release.set()
            await session.deliver("dlv_2")
            await second.until(lambda: len(second.model_calls) == 2)

        assert [(call.at.turn, call.at.step) for call in first.model_calls] == [(0, 0), (0, 1)]
        assert [(call.at.turn, call.at.step) for call in second.model_calls] == [(1, 0), (1, 1)]
        assert [call.at.turn for call in first.tool_calls] == [0]


async def test_what_a_driver_calls_runs_on_the_current_build_of_the_turns(bench: Bench, fleet: Fleet) -> None:
    first, second = Outside(), Outside()
    async with fleet.current("1", first), fleet.build("2", second):
        sessions = [await bench.start(first) for _ in range(6)]
        for session in sessions:
            await session.deliver("dlv_1")
        await first.until(lambda: len(first.consumed) == len(sessions))
        # Only the turns move, so that the drivers are certainly the old ones.
        await fleet.make_current("2", [names.TURNS_QUEUE])

        for session in sessions:
            await session.deliver("stale", token="another")
        await second.until(lambda: len(second.refused) == len(sessions))

        assert first.refused == []
        assert {await build_of(bench.client, session.handle.id) for session in sessions} == {"1"}


async def test_a_fleet_without_versions_serves_its_own_work(bench: Bench) -> None:
    outside = working()
    async with bench.working(outside):
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await session.deliver("stale", token="another")
        await outside.until(lambda: len(outside.model_calls) == 2 and len(outside.refused) == 1)

        assert len(outside.tool_calls) == 1
        assert await build_of(bench.client, session.handle.id) == ""
