"""`perdure trace`: where the time of a session has gone, without what was said."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.trace import chart
from perdure.cli.trace.spans import Span
from perdure.protocol.events import EventType, NewEvent, Usage
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionChange
from tests.support import commands, given
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk
from tests.support.waiting import until


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(agents="tests.cli.family:agent")


@pytest.fixture(scope="module")
def sessions() -> dict[str, str]:
    return {}


async def traced(stack: Stack, sessions: dict[str, str]) -> str:
    """A session with a retry, a child, an approval that was given after a while, and a second turn."""
    if "family" not in sessions:
        async with stack.talk() as talk:
            child = json.dumps({"message": 'use flaky {"key": "b"}'})
            await talk.create(f'use flaky {{"key": "a"}} then use helper {child} then use letter {{"to": "hidden"}}')
            asked = await until_asked(talk)
            await talk.send(inputResponses=[{"requestId": asked, "optionId": "approve"}])
            await talk.until_boundary()
            sessions["family"] = talk.session_id
    return sessions["family"]


async def until_asked(talk: Talk) -> str:
    events = await talk.until("session.waiting")
    talk.cursor = len(events)
    [requested] = [each for each in events if each["type"] == "input.requested"]
    return requested["data"]["requests"][0]["requestId"]


def run(stack: Stack, *words: str) -> str:
    done = commands.perdure("trace", *words, environment=stack.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flat(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for span in spans for each in (span, *flat(span.get("spans", [])))]


async def test_a_program_reads_turns_steps_calls_retries_and_waits(stack: Stack, sessions: dict[str, str]) -> None:
    session_id = await traced(stack, sessions)

    first, second = map(json.loads, run(stack, session_id, "--json").splitlines())

    assert (first["name"], first["status"], first["deliveries"]) == ("turn_0", "completed", 1)
    assert [each["name"] for each in first["spans"]] == ["step 0", "step 1", "step 2", "approval of letter"]
    by_name = {each["name"]: each for each in flat(first["spans"]) if each["kind"] != "step"}
    assert (by_name["flaky"]["attempts"], len(by_name["flaky"]["failures"])) == (2, 1)
    assert by_name["flaky"]["seconds"] >= 0.4
    assert by_name["helper"]["sessionId"].startswith("ses_")
    assert by_name["letter"]["status"] == "succeeded"
    wait = by_name["approval of letter"]
    assert (wait["status"], wait["waitsFor"], wait["answeredBy"]) == ("approve", "requester", "local-dev")
    assert first["usage"]["inputTokens"] > 0
    assert [each["kind"] for each in flat(second["spans"])] == ["step", "model"]


async def test_a_person_sees_bars_and_no_content(stack: Stack, sessions: dict[str, str]) -> None:
    session_id = await traced(stack, sessions)

    shown = run(stack, session_id)

    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert session_id in shown.splitlines()[0]
    assert "2 attempts" in lines["flaky"]
    assert "|" in lines["flaky"]
    assert "waited for requester, answered by local-dev" in lines["approval"]
    # Nobody looks at a terminal here.
    assert shown.isascii()
    for listed in (shown, run(stack, session_id, "--json"), run(stack, session_id, "--tree")):
        assert "hidden" not in listed


async def test_children_stand_below_the_call_that_started_them(stack: Stack, sessions: dict[str, str]) -> None:
    session_id = await traced(stack, sessions)

    lines = run(stack, session_id, "--tree", "--turn", "turn_0").splitlines()

    helper = next(number for number, line in enumerate(lines) if line.strip().startswith("helper"))
    assert lines[helper + 1].startswith("      turn_0")
    assert lines[helper + 2].startswith("        step 0")
    assert "turn_1" not in "".join(lines)


async def test_a_session_that_waits_says_for_whom_and_one_that_works_goes_on(stack: Stack) -> None:
    async with stack.talk() as waiting, stack.talk() as working:
        await waiting.create('use letter {"to": "x"}')
        await until_asked(waiting)
        await working.create('use flaky {"key": "c", "seconds": 15}')
        await working.until("actions.requested")
        await until(lambda: "flaky" in run(stack, working.session_id), "the call to begin")

        parked = run(stack, waiting.session_id)
        runs = run(stack, working.session_id)

    assert "open, waits for requester" in parked
    assert "running" in next(line for line in runs.splitlines() if "turn_0" in line)
    assert " s+" in next(line for line in runs.splitlines() if "flaky" in line)


@pytest.mark.parametrize("words", [("ses_none",), ("ses_none", "--tree", "--json")])
def test_an_unknown_session_is_said(stack: Stack, words: tuple[str, ...]) -> None:
    done = commands.perdure("trace", *words, environment=stack.environment)

    assert done.returncode == 1
    assert "ses_none" in done.stderr


@pytest.mark.parametrize("turn", ["2", "turn_99", "x", "-1", "1e9", "9" * 40])
async def test_a_turn_that_is_not_there_is_said(stack: Stack, sessions: dict[str, str], turn: str) -> None:
    session_id = await traced(stack, sessions)

    done = commands.perdure("trace", session_id, f"--turn={turn}", environment=stack.environment)

    assert done.returncode == 1
    assert "it has 2, from turn_0 on" in done.stderr


@asynccontextmanager
async def long_session(folder: Path, turns: int, events: int) -> AsyncGenerator[Store]:
    """Many turns with many events each."""
    store = await open_store(f"sqlite:///{folder / 'perdure.db'}")
    try:
        await store.migrate()
        await store.create_session(given.session())
        for turn in range(turns):
            kinds = [EventType.TURN_STARTED, *[EventType.STEP_STARTED] * (events - 2), EventType.TURN_COMPLETED]
            new = [
                NewEvent(type=kind, key=f"t{turn}/{number}", turn=turn, step=max(0, number - 1), data={"turnId": turn})
                for number, kind in enumerate(kinds)
            ]
            await store.commit(Commit("s", events=new, change=SessionChange(turns=turn + 1)))
        yield store
    finally:
        await store.close()


async def test_the_last_turns_of_ten_thousand_events_are_read_at_once(tmp_path: Path) -> None:
    async with long_session(tmp_path, 200, 50):
        environment = {"PERDURE_DATA_DIR": str(tmp_path)}
        began = time.monotonic()
        done = commands.perdure("trace", "s", environment=environment)
        took = time.monotonic() - began
        fewer = commands.perdure("trace", "s", "--last", "2", environment=environment)

    named = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("turn_")]
    assert named == [f"turn_{number}" for number in range(190, 200)]
    assert "190 earlier turns not shown" in done.stdout
    assert took < 30
    assert len([line for line in fewer.stdout.splitlines() if line.startswith("turn_")]) == 2


async def test_a_turn_of_ten_thousand_events_is_cut_and_says_so(tmp_path: Path) -> None:
    async with long_session(tmp_path, 1, 10_000):
        done = commands.perdure("trace", "s", environment={"PERDURE_DATA_DIR": str(tmp_path)})

    assert "there is more of it than is shown here" in done.stdout


def lines_of(span: Span, columns: int, *, rich: bool = True) -> list[str]:
    pen = chart._Pen(columns, rich=rich)  # pyright: ignore[reportPrivateUsage]
    return list(pen.turn(span))


TURN = Span(
    "turn",
    "turn_0",
    1_000.0,
    1_010.0,
    "completed",
    usage=Usage(input_tokens=5, cache_read_tokens=3),
    spans=[
        Span("model", "model", 1_000.0, 1_005.0, "succeeded"),
        Span("call", "a_tool_with_a_very_long_name_that_fits_nowhere", 1_005.0, 1_010.0, "failed"),
        Span("wait", "approval of x", 1_010.0, 1_000_010.0, "approve", waits_for="role support"),
    ],
)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    import re

    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines_of(TURN, columns)]

    assert max(map(len, lines)) <= columns
    assert len(lines) == 4


def test_a_wait_of_days_does_not_hide_the_rest() -> None:
    _, model, call, wait = lines_of(TURN, 200, rich=False)

    bars = [line.partition("|")[2].partition("|")[0] for line in (model, call, wait)]
    half = len(bars[0]) // 2
    assert abs(bars[0].count("#") - half) <= 1
    assert abs(bars[1].count("#") - half) <= 1
    assert "11d 13h" in wait


def test_a_name_cannot_command_the_terminal() -> None:
    [line, *_] = lines_of(Span("turn", "\x1b[2Jturn", 0.0, 1.0, "completed"), 80, rich=False)

    assert "\x1b" not in line
