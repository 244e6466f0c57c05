"""Recorded histories must replay for as long as a session that wrote one may be alive."""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer, WorkflowRunner
from temporalio.workflow import NondeterminismError

import worker as composition
from perdure.errors import PerdureError
from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from workflows.patches import PATCHES
from workflows.run import RunWorkflow
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

from .commands import CommandRecorder, departures, ordered, recorded
from .record import HISTORIES as DIRECTORY
from .scenarios import SCENARIOS
from .story import attributes, contains, story

HISTORIES = sorted(DIRECTORY.glob("*.json"))

#: What the recordings are for that older code has made: no scenario plays them any more as they were.
EARLIER = {
    "1-session": ("ask refuse_delivery", *["ask turn", "turn ends"] * 4, "ends"),
    "1-turn-0": ("begins", "ask call_model", "call_model ends", "ends"),
    "1-turn-1": ("ask call_tool", "ask call_tool", "call_tool ends", "call_tool ends", "ask call_model", "ends"),
    "1-turn-2": ("call_model fails", "ask conclude_turn", "conclude_turn ends", "ends"),
    "1-turn-3": ("call_model fails", "ask conclude_turn", "conclude_turn ends", "ends"),
    "1-turn-20-calls": ("call_model ends", *["ask call_tool"] * 20, "call_tool ends", "ask call_model", "ends"),
    "2-held-session": ("turn ends", "ask attend_session", "timer", "signal deliver", "ask turn"),
    "2-parked": ("turn ends", "signal cancel", "ask withdraw_inputs"),
}

#: From this label on, recordings are named as the scenarios are.
_NAMED = 3
_NAME = re.compile(r"(\d+)-(.+)")

SHOWN = {name: shows for scenario in SCENARIOS for name, shows in scenario.recordings().items()}

#: A process and its machine, as the SDK writes them, and places on a disk.
_OF_A_MACHINE = re.compile(r"\d+@(?!recorder)\w|/(root|home|Users|opt|work|tmp|var|usr)/|site-packages|\.py\b")


OF_TYPE = {
    names.SESSION_WORKFLOW: SessionWorkflow,
    names.TURN_WORKFLOW: TurnWorkflow,
    names.RUN_WORKFLOW: RunWorkflow,
}
QUEUES = {TurnWorkflow: names.TURNS_QUEUE, RunWorkflow: names.RUNS_QUEUE}


def a_replayer(
    *workflows: type, runner: WorkflowRunner = composition.SANDBOX, fails_with: Sequence[type[BaseException]] = ()
) -> Replayer:
    return Replayer(
        workflows=workflows,
        data_converter=pydantic_data_converter,
        workflow_runner=runner,
        workflow_failure_exception_types=fails_with,
        # The end of the name of the task queue that it gives to the workflow.
        build_id=next((queue for kind, queue in QUEUES.items() if kind in workflows), names.SESSIONS_QUEUE),
        # Otherwise an activation that waits two seconds for a processor would be taken for a deadlock.
        debug_mode=True,
    )


def a_history(path: Path) -> WorkflowHistory:
    events = WorkflowHistory.from_json(path.stem, path.read_text()).events
    return WorkflowHistory(attributes(events[0]).workflow_id, events)


def named(path: Path) -> tuple[int, str]:
    found = _NAME.fullmatch(path.stem)
    assert found, path.stem
    return int(found[1]), found[2]


async def replayed(history: WorkflowHistory) -> CommandRecorder:
    """Replay it as workers run it, and collect its commands."""
    recorder = CommandRecorder(composition.SANDBOX)
    kind = OF_TYPE[attributes(history.events[0]).workflow_type.name]
    fails_with = [PerdureError] if kind is TurnWorkflow else []
    await a_replayer(kind, runner=recorder, fails_with=fails_with).replay_workflow(history)
    return recorder


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_history_replays(path: Path) -> None:
    history = a_history(path)

    recorder = await replayed(history)

    # Those that are older were recorded when some of what is asked had other fields or bounds.
    if named(path)[0] >= _NAMED:
        assert departures(recorded(history), ordered(recorder.commands)) == []


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_recording_contains_what_it_is_for(path: Path) -> None:
    wanted = EARLIER.get(path.stem) or SHOWN[named(path)[1]]

    lines = story(a_history(path))

    assert wanted
    assert contains(lines, wanted), lines


def test_every_scenario_is_recorded() -> None:
    recordings = {name for label, name in map(named, HISTORIES) if label >= _NAMED}

    assert {name for name in SHOWN if name not in recordings} == set()
    assert set(EARLIER) <= {path.stem for path in HISTORIES}


#: The recordings of what sessions go through most.
KINDS_OF_SESSIONS = {
    "text": ["session"],
    "tools": ["session", "task"],
    "parallel tools": ["called-in-turns-turn-0", "unlimited-calls", "rekeyed"],
    "approval by answer": ["approved", "answered-in-parts", "answered-again"],
    "approval by expiry": ["expired"],
    "reminder": ["reminded"],
    "withdrawal": ["withdrawn", "withdrawn-task"],
    "question": ["question"],
    "stale refusal": ["session", "rekeyed"],
    "rollover": ["renewed", "renewed-turn", "renewed-while-parked", "renewed-by-length"],
    "failed turn": ["session", "failed-task", "lost-call", "silent-call-turn-0", "terminated-turn"],
    "inline turns": [
        *("inline-session", "inline-parallel-calls", "inline-approved", "inline-expired", "inline-withdrawn"),
        *("inline-cancelled-twice", "inline-cancel-while-tools-run", "inline-long-turn", "inline-in-between"),
    ],
    "cancel while idle": ["cancel-while-idle"],
    "cancel before the turn": ["cancel-before-the-turn", "cancel-while-the-turn-begins", "cancel-that-is-early"],
    "cancel in the turn": [
        *("cancel-while-the-model-is-called", "cancel-before-calls", "cancel-while-tools-run"),
        *("cancel-while-tools-end-well", "cancel-that-a-step-finds", "cancel-while-resuming", "cancelled-task"),
    ],
    "cancel at the end of the turn": [
        *("cancel-while-a-turn-concludes", "cancel-that-meets-the-end", "cancel-that-is-late"),
        *("cancelled-while-parking", "cancel-while-concluding"),
    ],
    "cancel while parked": ["withdrawn", "parked", "cancel-while-reminding", "cancel-while-withdrawing"],
    "cancel while refusing": ["cancel-while-refusing", "cancel-of-an-unknown-kind"],
    "cancel while held": ["held-until-cancelled", "cancel-while-attention-is-asked-for"],
    "cancel while the state is lost": ["cancel-while-rebuilding", "cancel-while-unreadable"],
}


@pytest.mark.parametrize("kind", KINDS_OF_SESSIONS)
def test_each_kind_of_session_is_recorded(kind: str) -> None:
    recordings = {name for label, name in map(named, HISTORIES) if label >= _NAMED}

    assert {*KINDS_OF_SESSIONS[kind]} - recordings == set()


def test_every_guard_of_the_workflows_is_met_by_a_recording() -> None:
    """A patch that no recording has met could be turned around unnoticed."""
    met = {line.removeprefix("patch ") for path in HISTORIES for line in story(a_history(path)) if "patch " in line}

    assert {patch.id for patch in PATCHES} - met == set()


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_recording_does_not_say_where_it_was_made(path: Path) -> None:
    texts: list[str] = []

    def read(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, item in cast(dict[str, Any], value).items():
                read(item, key)
        elif isinstance(value, list):
            for item in cast(list[Any], value):
                read(item)
        elif isinstance(value, str):
            texts.append(base64.b64decode(value).decode() if name == "data" else value)

    read(json.loads(path.read_text()))

    assert [text for text in texts if _OF_A_MACHINE.search(text)] == []


@workflow.defn(name=names.TURN_WORKFLOW, sandboxed=False)
class HastyTurn:
    """A change of a workflow's body that is not guarded with a patch."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        await workflow.sleep(1)
        raise AssertionError(request)


async def test_an_unguarded_change_does_not_replay() -> None:
    turn = next(path for path in HISTORIES if "turn-0" in path.stem)

    with pytest.raises(NondeterminismError):
        await a_replayer(HastyTurn).replay_workflow(a_history(turn))


async def test_a_change_of_what_is_asked_is_noticed_although_it_replays() -> None:
    history = a_history(DIRECTORY / "3-expired.json")
    orders = ordered((await replayed(history)).commands)

    orders["timer"][0]["seconds"] += 1
    orders["activity"] = [{**each, "input": []} for each in orders["activity"]]
    orders["turn"][1]["input"][0]["expired"] = []

    changed = [each.split(" was ")[0] for each in departures(recorded(history), orders)]
    assert changed == ["timer 0", "turn 1"]
