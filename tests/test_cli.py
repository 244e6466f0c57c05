"""The command line, as processes."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.runtime.processes import command
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.stack import Stack

ROOT = Path(__file__).parent.parent


def perdure(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    part, *options = words
    return subprocess.run(
        command(part, *options),
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_says_its_version() -> None:
    assert re.fullmatch(r"perdure \d+\.\d+\.\d+\S*\n", perdure("version").stdout)


def test_a_key_is_shown_once_with_the_entry_that_admits_it() -> None:
    said = perdure("api-key", "bob").stdout

    key, entry = (line.rpartition(" ")[2] for line in said.splitlines())
    assert entry == f"bob={hashlib.sha256(key.encode()).hexdigest()}"


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (("api-key", "bob,eve"), {}, "A key's name is made of letters"),
        (("worker",), {"PERDURE_HEARTBEAT_TIMEOUT": "soon"}, "PERDURE_HEARTBEAT_TIMEOUT: "),
        (("api", "--agents", "no_such:agent"), {}, "There is no module 'no_such'"),
        (("migrate",), {"PERDURE_DATABASE_URL": "oracle://x"}, "No store is known for oracle"),
        (("dev",), {"PERDURE_TEMPORAL_BIN": "no-such-program"}, "PERDURE_TEMPORAL_BIN names no-such-program"),
    ],
    ids=["a bad name", "a bad setting", "no such agent", "no such store", "no such program"],
)
def test_an_error_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    ended = perdure(*words, PERDURE_DATA_DIR=str(tmp_path), **environment)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"perdure: {sentence}")
    assert ended.stderr.count("\n") == 1


async def test_sessions_are_listed_and_their_events_shown(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("a title of its own")
    environment = {name: value for name, value in stack.environment.items() if name.startswith("PERDURE_")}

    listed = perdure("sessions", **environment).stdout
    shown = perdure("tail", talk.session_id, "--no-follow", **environment).stdout

    assert re.search(rf"^{talk.session_id}  waiting .* a title of its own$", listed, re.MULTILINE)
    events = [json.loads(line) for line in shown.splitlines()]
    assert [event["index"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "session.waiting"


@pytest.mark.parametrize("program", [command("worker"), [sys.executable, str(ROOT / "worker.py")]], ids=["cli", "file"])
def test_a_worker_waits_for_temporal(tmp_path: Path, program: list[str]) -> None:
    environment = {
        **clean_environment(),
        "PERDURE_DATA_DIR": str(tmp_path),
        "PERDURE_TEMPORAL_ADDRESS": f"127.0.0.1:{free_port()}",
    }
    worker = Process("worker", program, tmp_path / "worker.log", environment)
    try:
        wait_until(lambda: "waiting for Temporal" in worker.output or not worker.alive, "the worker to say so")
        assert worker.alive, worker.output

        assert worker.terminate() == 0
    finally:
        worker.close()
