"""An edit of the workflows that running sessions could not survive does not replay."""

import importlib
import itertools
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from temporalio.worker import UnsandboxedWorkflowRunner
from temporalio.workflow import NondeterminismError

import worker as composition
from perdure.protocol.deliveries import DeliveryRef
from perdure.session import decisions
from perdure.session.state import SessionState

from .commands import departures, ordered, recorded
from .test_replay import DIRECTORY, a_history, a_replayer, replayed

NUMBERS = itertools.count()
Edit = Callable[[str, str, str], ModuleType]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Edit]:
    """Imports a copy of the workflows in which a text of one file was replaced by another."""
    package = f"edited_workflows_{next(NUMBERS)}"
    shutil.copytree(Path(composition.__file__).parent / "workflows", tmp_path / package)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def edited(file: str, old: str, new: str) -> ModuleType:
        path = tmp_path / package / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        importlib.import_module(f"{package}.session")
        return importlib.import_module(package)

    yield edited
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


async def replay(edited: ModuleType, recording: str) -> None:
    kind = edited.turn.TurnWorkflow if "-turn-" in recording else edited.session.SessionWorkflow
    # The sandbox would import the copy again for each run.
    replayer = a_replayer(kind, runner=UnsandboxedWorkflowRunner())
    await replayer.replay_workflow(a_history(DIRECTORY / f"{recording}.json"))


@pytest.mark.parametrize(
    ("recording", "file", "old", "new"),
    [
        pytest.param(
            "3-reminded",
            "session.py",
            "self._state = self._state.reminded(request)",
            "self._state = self._state.reminded(request)\n                await workflow.sleep(1)",
            id="a timer more",
        ),
        pytest.param(
            "3-withdrawn",
            "inbox.py",
            "names.WITHDRAW_INPUTS, withdrawal",
            "names.REMIND, withdrawal",
            id="another activity",
        ),
        pytest.param(
            "3-held-session",
            "session.py",
            "            await inbox.attend(self._state.session_id, attention, request.turn)",
            "            pass",
            id="an activity less",
        ),
        pytest.param("3-overtaken", "inbox.py", 'workflow.patched("inbox-in-order")', "True", id="a guard removed"),
        pytest.param(
            "3-approved-turn-1",
            "turn.py",
            "return await self._execute(\n            names.RESUME_TURN",
            "await asyncio.sleep(1)\n        return await self._execute(\n            names.RESUME_TURN",
            id="a pause in a turn",
        ),
        pytest.param(
            "9-inline-approved",
            "turn.py",
            "            end = await run_turn(request, self)",
            "            await asyncio.sleep(1)\n            end = await run_turn(request, self)",
            id="a pause in an inline turn",
        ),
        pytest.param(
            "9-inline-in-between",
            "session.py",
            'self._state.turns == "inline" and workflow',
            "workflow",
            id="inline although a child was asked for",
        ),
    ],
)
async def test_a_nondeterministic_edit_does_not_replay(
    edit: Edit, recording: str, file: str, old: str, new: str
) -> None:
    edited = edit(file, old, new)

    with pytest.raises(NondeterminismError):
        await replay(edited, recording)


def first_only(session: SessionState) -> tuple[DeliveryRef, ...]:
    return session.inbox[:1]


def never(session: SessionState) -> None:
    del session


@pytest.mark.parametrize(
    ("recording", "decision", "edited"),
    [("3-coalesced", "next_batch", first_only), ("3-expired", "next_deadline", never)],
)
async def test_an_edit_of_what_a_driver_decides_is_noticed(
    monkeypatch: pytest.MonkeyPatch, recording: str, decision: str, edited: Callable[..., Any]
) -> None:
    monkeypatch.setattr(decisions, decision, edited)
    history = a_history(DIRECTORY / f"{recording}.json")

    try:
        changed = departures(recorded(history), ordered((await replayed(history)).commands))
    except NondeterminismError:
        changed = ["other commands"]

    assert changed


@pytest.mark.parametrize("recording", ["3-reminded", "3-withdrawn", "3-held-session", "3-overtaken"])
async def test_an_edit_of_a_comment_replays(edit: Edit, recording: str) -> None:
    edited = edit("session.py", '"""The driver: one long-lived workflow per session."""', '"""The driver."""')

    await replay(edited, recording)
