"""Runs that began with a state that only a newer build reads, on such a build."""

import uuid
from pathlib import Path

import pytest

from perdure.protocol import names
from perdure.protocol.wire import JsonObject
from perdure.session import state
from perdure.session.state import Chain, SessionState
from tests.support.waiting import until
from tests.support.workflows import Bench, Driven, Outside
from tests.workflows.story import story
from tests.workflows.test_edits import Edit, NondeterminismError, replay
from tests.workflows.test_edits import edit as edit
from tests.workflows.test_replay import a_history, a_replayer
from workflows.session import SessionWorkflow

HISTORIES = Path(__file__).parent / "histories"
RECORDED = ["rebuilt-in-the-next-version", "state-of-the-next-version", "state-of-the-next-version-run-1"]


def v1_to_v2(data: JsonObject) -> JsonObject:
    """Version 2 counts turns from one."""
    return {**data, "turn": data["turn"] + 1}


def lift_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a build whose session state has version 2."""
    monkeypatch.setattr(state, "SESSION", Chain("session state", [v1_to_v2]))


async def until_it_waits(session: Driven) -> None:
    async def waits() -> bool:
        return "timer" in story(await session.handle.fetch_history())

    await until(waits, "the driver to wait")


@pytest.mark.parametrize("name", RECORDED)
async def test_a_newer_build_replays_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lift_sessions(monkeypatch)

    await a_replayer(SessionWorkflow).replay_workflow(a_history(HISTORIES / f"6-{name}.json"))


@pytest.mark.parametrize("name", RECORDED)
async def test_without_the_guard_it_could_not(name: str, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    lift_sessions(monkeypatch)
    edited = edit("versions.py", "return workflow.patched(version_patch(version))", "return True")

    with pytest.raises(NondeterminismError):
        await replay(edited, f"6-{name}")


async def test_a_newer_build_takes_over_a_session_that_an_older_one_could_not_read(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The id of the turn's workflow must be new on this server.
    state_of = SessionState(session_id=f"ses_{uuid.uuid4().hex}", agent="demo", token_hash="now", turn=7)
    newer = state_of.model_dump(mode="json")
    async with bench.working(outside):
        session = await bench.start(outside, {**newer, "version": 2})
        await until_it_waits(session)
        await session.deliver("dlv_0")

    lift_sessions(monkeypatch)
    second = Outside()
    async with bench.working(second):
        await session.handle.signal(names.REPAIR, {"how": "retry"})
        await second.until(lambda: second.consumed == ["dlv_0"])

    assert [each.attention and each.attention.code for each in outside.attended] == ["UNREADABLE_STATE"]
    assert second.attended[-1].attention is None
    assert [call.at.turn for call in second.model_calls] == [7]


async def test_a_newer_build_lifts_the_state_of_a_session_when_it_continues(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    lift_sessions(monkeypatch)
    async with bench.working(outside):
        session = await bench.start(outside, turn=3)
        await session.deliver("dlv_0")
        await session.consumed("dlv_0")
        view = await session.handle.query(names.DESCRIBE)

    assert [call.at.turn for call in outside.model_calls] == [4]
    # It is not lifted again when the driver continues as new.
    assert view["version"] == 2


def test_a_migrator_that_raises_leaves_the_state_to_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_sessions(monkeypatch)

    with pytest.raises(state.UnreadableState, match="a migrator of the session state raised KeyError"):
        state.load_session({"version": 1, "sessionId": "s"})
