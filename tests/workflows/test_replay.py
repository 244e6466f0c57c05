"""Recorded histories must replay for as long as a session that wrote one may be alive."""

from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

import worker as composition
from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))


def a_replayer(*workflows: type) -> Replayer:
    return Replayer(workflows=workflows, data_converter=pydantic_data_converter, workflow_runner=composition.SANDBOX)


def a_history(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(path.stem, path.read_text())


def test_there_are_histories_to_replay() -> None:
    assert len(HISTORIES) >= 5


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_history_replays(path: Path) -> None:
    await a_replayer(SessionWorkflow, TurnWorkflow).replay_workflow(a_history(path))


@workflow.defn(name=names.TURN_WORKFLOW, sandboxed=False)
class HastyTurn:
    """A change of a workflow's body that nobody guarded with a patch."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        await workflow.sleep(1)
        raise AssertionError(request)


async def test_an_unguarded_change_does_not_replay() -> None:
    turn = next(path for path in HISTORIES if "turn-0" in path.stem)

    with pytest.raises(NondeterminismError):
        await a_replayer(HastyTurn).replay_workflow(a_history(turn))
