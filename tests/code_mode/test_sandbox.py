"""The process that runs programs: what a program may do, and what it cannot."""

import asyncio
import base64
import contextlib
import signal
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from perdure.harness.programs import process as processes
from perdure.harness.programs.process import Forker, run_in_process
from perdure.harness.programs.sandbox import Answer, PastStage, Request, Result
from tests.support.waiting import until


def request(code: str, **more: Any) -> Request:
    functions: Any = {
        "add": {"tool": "add", "parameters": ["a", "b"]},
        "my_tool": {"tool": "my-tool", "parameters": []},
    }
    known: Any = {
        "code": code,
        "functions": functions,
        "seed": "s",
        "now": "2026-01-02T03:04:05+00:00",
        "calls": 10,
        "state": None,
        "past": [],
        "printed": "",
        "room": 1_000_000,
    }
    known.update(more)
    return known


def results(answer: Answer, *values: Any) -> PastStage:
    settled: list[Result] = [{"value": value, "error": None, "denied": False} for value in values]
    return {"digests": [each["digest"] for each in answer.get("calls", [])], "results": settled}


async def run(code: str, **more: Any) -> Answer:
    return await run_in_process(request(code, **more), "family")


STEPS = """
import asyncio, random, datetime
print("begun")
x = await asyncio.gather(add(1, 2), add(a=3, b=4))
f = add
y = await f(x[0], b=x[1])
[y, random.random(), str(datetime.datetime.now())]
"""


async def test_a_program_goes_on_from_its_state() -> None:
    first = await run(STEPS)
    second = await run("never read", state=first.get("state"), past=[results(first, 3, 7)], printed="begun\n")
    third = await run("never read", state=second.get("state"), past=[results(second, 10)], printed="begun\n")

    assert [(each["tool"], each["arguments"]) for each in first.get("calls", [])] == [
        ("add", '{"a": 1, "b": 2}'),
        ("add", '{"a": 3, "b": 4}'),
    ]
    assert [each["arguments"] for each in second.get("calls", [])] == ['{"a": 3, "b": 7}']
    (value,) = third.get("value", [])
    assert (value[0], value[2]) == (10, "2026-01-02 03:04:05")
    assert third.get("printed") == "begun\n"


async def test_a_program_runs_again_as_it_ran() -> None:
    first = await run(STEPS)
    second = await run("", state=first.get("state"), past=[results(first, 3, 7)])
    past = [results(first, 3, 7), results(second, 10)]

    assert (await run("", state=second.get("state"), past=past[-1:])).get("value") == (await run(STEPS, past=past)).get(
        "value"
    )


async def test_a_program_that_makes_another_call_is_found_out() -> None:
    first = await run(STEPS)
    past = results(first, 3, 7)

    assert (await run(STEPS.replace("b=4", "b=5"), past=[past])).get("diverged") == 2
    assert (await run("await add(1, 2)", past=[past])).get("diverged") == 2
    assert (await run("5", past=[past])).get("diverged") == 1


@pytest.mark.parametrize("state", ["", "AAAA", base64.b64encode(zlib.compress(b"of another version" * 9)).decode()])
async def test_a_state_that_cannot_be_loaded_is_reported(state: str) -> None:
    first = await run(STEPS)

    assert (await run(STEPS, state=state, past=[results(first, 3, 7)])).get("unloadable")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("while True: pass", "time limit"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "time limit"),
        ("sum(range(10**12))", "time limit"),
        ("x = 'a' * 1000\nfor _ in range(40): x = x + x", "MemoryError"),
        ("'a' * 50_000_000", "MemoryError"),
        ("2 ** (2 ** 40)", "MemoryError"),
        ("a = []\nfor _ in range(200_000): a = [a]\na", "nested deeper than 100"),
        ("a = [0]\nfor _ in range(60): a = [a, a]\na", "more than 200000 parts"),
        ("10 ** 30", "more than 64 bits"),
        ("class A: pass\nA()", "is no JSON"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        ("import os\nos.environ['PATH']", "not supported"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("__import__('os').system('true')", "NameError"),
        ("await nothing(1)", "NameError"),
        ("await add(1, 2, 3)", "takes 2 arguments"),
        ("await add(1, a=2)", "twice"),
        ("add(1, 2)", "without waiting for its calls of add"),
        ("for _ in range(11): await_me = add(1, 2)", "more calls than one program may"),
        ("def (:", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
    ],
)
async def test_what_a_program_may_not_do_is_its_error(code: str, complaint: str) -> None:
    answer = await run(code)

    assert complaint in answer.get("error", "")
    assert len(answer.get("error", "")) < 5_000


async def test_values_that_cannot_be_arguments_are_a_problem_of_the_call() -> None:
    answer = await run("a = [0]\nfor _ in range(60): a = [a, a]\nawait add(a, b=float('nan'))")

    (call,) = answer.get("calls", [])
    assert (call["arguments"], call["problem"]) == (None, "it has more than 200000 parts")


async def test_the_arguments_of_calls_that_are_made_at_once_have_a_limit_together() -> None:
    answer = await run("s = 'x' * 3_000_000\nimport asyncio\nawait asyncio.gather(*[add(s, b=i) for i in range(10)])")

    known = answer.get("calls", [])
    assert [bool(each["arguments"]) for each in known] == [True, *[False] * 9]
    assert {each["problem"] for each in known[1:]} == {
        "with those of the calls before it, it has more than 4194304 characters as JSON"
    }
    # A repeated run is compared by all of them.
    assert len({each["digest"] for each in known}) == 10


async def test_what_a_program_prints_is_cut() -> None:
    answer = await run("for _ in range(100_000): print('x' * 100)\n1")

    assert answer.get("value") == [1]
    assert len(answer.get("printed", "")) == 10_000


async def test_a_program_does_not_sleep() -> None:
    began = time.monotonic()
    answer = await run("import asyncio, time\ntime.sleep(1000)\nawait asyncio.sleep(1000)\n1")

    assert answer.get("value") == [1]
    assert time.monotonic() - began < 20


@pytest.mark.alone
async def test_hostile_programs_do_not_hold_up_their_worker() -> None:
    """The event loop that serves all other sessions never stands still for a second."""
    hostile = [
        "while True: pass",
        "await add('a' * 20_000_000)",
        "a = []\nfor _ in range(200_000): a = [a]\na",
        "[[0] * 10 for _ in range(100_000)]",
        "for _ in range(100_000): print('x' * 100)",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    ]
    programs = [asyncio.create_task(run(code)) for code in hostile]
    longest, last = 0.0, time.monotonic()
    while not all(each.done() for each in programs):
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()

    assert longest < 1.0


async def test_the_programs_of_one_family_do_not_keep_those_of_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.harness.programs.process._MOST_AT_ONCE", 1)
    ended: list[str] = []

    async def compute(family: str) -> None:
        assert (await run_in_process(request("1"), family)).get("value") == [1]
        ended.append(family)

    programs = [asyncio.create_task(compute(family)) for family in [*("many",) * 6, "one", "other", "one"]]
    # One that is given up while it waits leaves its place to the others.
    gone = asyncio.create_task(compute("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*programs)

    assert set(ended[:4]) == {"many", "one", "other"}
    assert sorted(ended) == ["many"] * 6 + ["one"] * 2 + ["other"]


async def test_a_stage_runs_although_the_process_that_forks_has_died_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    forker = Forker()
    monkeypatch.setattr(processes, "_forker", forker)
    monkeypatch.setattr(processes, "_ANSWERS", 2.0)
    try:
        seen: set[int] = set()
        for number in (None, signal.SIGKILL, signal.SIGSTOP):
            if number and forker.process:
                forker.process.send_signal(number)
            assert (await run("await add(1, 2)")).get("calls")
            assert forker.process is not None
            seen.add(forker.process.pid)
    finally:
        forker.close()

    assert len(seen) == 3


async def test_the_process_that_forks_ends_when_there_are_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    forker = Forker(idle=0.1)
    monkeypatch.setattr(processes, "_forker", forker)
    try:
        for _ in range(2):
            assert (await run("1")).get("value") == [1]
            idle = forker.process
            assert idle is not None
            await until(lambda idle=idle: idle.poll() is not None, "it to end")
    finally:
        forker.close()


async def test_a_program_that_is_given_up_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    forker = Forker()
    monkeypatch.setattr(processes, "_forker", forker)
    forked: list[int] = []
    fork = forker.fork

    def noted(connection: socket.socket) -> int | None:
        pid = fork(connection)
        forked.extend([] if pid is None else [pid])
        return pid

    monkeypatch.setattr(forker, "fork", noted)
    try:
        running = asyncio.create_task(run("while True: pass"))
        await until(lambda: bool(forked), "it to run")
        assert Path(f"/proc/{forked[0]}").exists()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

        await until(lambda: not Path(f"/proc/{forked[0]}").exists(), "it to end")
    finally:
        forker.close()


async def test_a_worker_without_the_interpreter_leaves_the_program_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONTY_BIN", "/nowhere/monty")

    assert not {"value", "error", "calls"} & (await run("1")).keys()
