"""The command line: as processes, and where only what is said matters, in this one."""

import hashlib
import json
import re
import sqlite3
import stat
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from api.auth import ApiKeys, Credentials, parse_keys
from perdure.dev.supervisor import command
from perdure.store.open import open_store
from tests.support import commands, given
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.stack import Stack, TemporalServer

ROOT = Path(__file__).parents[2]


def perdure(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run(words, environment=environment, within=120)


def run(
    words: Sequence[str], *, environment: Mapping[str, str], within: float, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    part, *options = words
    return subprocess.run(
        command(part, *options),
        cwd=folder,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=within,
    )


def operate(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The same for the commands of an operator, without a process."""
    return commands.perdure(*words, environment={**clean_environment(), **environment})


def test_it_prints_its_version() -> None:
    assert re.fullmatch(r"perdure \d+\.\d+\.\d+\S*\n", perdure("version").stdout)


#: What the installed `perdure` calls.
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["perdure"]

#: Python imports it first. While an interpreter shuts down, it clears the modules.
SHUTS_DOWN = """
import os

class Last:
    def __del__(self, write=os.write):
        write(2, b"shut down")

last = Last()
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("perdure.cli.commands.main(['version'])", 0),
        ("perdure.cli.commands.main(['sessions'])", 1),
        ("perdure.cli.commands.main(['sessions', '--no-such-option'])", 2),
        ("perdure.cli.commands.run = interrupted; perdure.cli.commands.main()", 130),
        ("runpy.run_module('perdure', run_name='__main__')", 0),
        (f"importlib.metadata.EntryPoint('perdure', {SCRIPT!r}, 'console_scripts').load()()", 0),
    ],
    ids=["done", "refused", "misused", "interrupted", "module", "script"],
)
def test_a_process_ends_with_everything_written_and_without_a_shutdown_that_could_crash(
    tmp_path: Path, program: str, code: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHUTS_DOWN)
    before = (
        "import atexit, importlib.metadata, runpy, sys, perdure.cli.commands\n"
        "def interrupted(words): sys.exit(130)\n"
        "sys.argv = ['perdure', 'version']\n"
        "atexit.register(print, 'at exit')\n"
        "print('written')\n"
    )
    environment = {**clean_environment(), "PYTHONPATH": str(tmp_path), "PERDURE_DATA_DIR": str(tmp_path / "nowhere")}

    ended = subprocess.run(
        [sys.executable, "-c", before + program], env=environment, capture_output=True, text=True, check=False
    )

    assert ended.returncode == code
    assert ended.stdout.startswith("written\n")
    assert ended.stdout.endswith("at exit\n")
    assert "shut down" not in ended.stderr


def test_a_key_is_shown_once_with_the_entry_that_admits_it() -> None:
    said = perdure("api-key", "bob").stdout

    key, entry = (line.rpartition(" ")[2] for line in said.splitlines())
    assert entry == f"bob={hashlib.sha256(key.encode()).hexdigest()}"


async def test_a_key_with_roles_is_let_in_with_them() -> None:
    said = operate("api-key", "bob", "--role", "finance", "--role", "ops", "--attribute", "team=a").stdout
    key, entry = (line.rpartition(" ")[2] for line in said.splitlines())

    bob = await ApiKeys(parse_keys(entry))(Credentials(Headers({"x-api-key": key})))

    assert bob is not None
    assert (bob.principal_id, bob.attributes) == ("bob", {"role": ["finance", "ops"], "team": ["a"]})


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (("api-key", "bob,eve"), {}, "A key's name is made of letters"),
        (("api-key", "bob", "--role", "a+role=b"), {}, "An attribute is NAME=VALUE"),
        (("worker",), {"PERDURE_HEARTBEAT_TIMEOUT": "soon"}, "PERDURE_HEARTBEAT_TIMEOUT: "),
        (("dev", "--data-dir", "data"), {"PERDURE_MAX_INBOX": "0"}, "PERDURE_MAX_INBOX: "),
        (("worker",), {"PERDURE_LOG_LEVEL": "loud"}, "PERDURE_LOG_LEVEL is debug, info, warning or error"),
        (("api", "--agents", "no_such:agent"), {}, "There is no module 'no_such'"),
        (("migrate",), {"PERDURE_DATABASE_URL": "oracle://x"}, "No store is known for oracle"),
        (("dev",), {"PERDURE_TEMPORAL_BIN": "no-such-program"}, "PERDURE_TEMPORAL_BIN names no-such-program"),
    ],
    ids=[
        "a bad name",
        "a bad role",
        "a bad setting",
        "a bad setting of dev",
        "a bad level",
        "no such agent",
        "no such store",
        "no such program",
    ],
)
def test_an_error_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    options = ("--temporal-port", "--ui-port") if words == ("dev",) else ()
    ports = [word for option in options for word in (option, str(free_port()))]
    ended = perdure(*words, *ports, PERDURE_DATA_DIR=str(tmp_path), PERDURE_PORT=str(free_port()), **environment)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"perdure: {sentence}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("agent = Agnet('x')", "NameError: name 'Agnet' is not defined (mine.py, line 3; PERDURE_LOG_LEVEL="),
        ("agent = Agent('My Agent')", "The agent name 'My Agent' will not do: "),
        ("@tool(effects='sometimes')\ndef f() -> None: ...", "Tool 'f': effects are "),
    ],
)
def test_a_mistake_in_the_authors_module_is_reported_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(f"from perdure import Agent, tool\n\n{line}\n")

    ended = run(("dev", "--agents", "mine:agent"), environment={}, within=60, folder=tmp_path)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"perdure: {sentence}")
    assert "(mine.py, line 3" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("sessions",),
        ("tail", "ses_1"),
        *(("sessions", name, *more) for name, *more in (["cancel", "s"], ["repair", "s", "--retry"], ["reconcile"])),
        ("api",),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_in_a_wrong_folder_says_so_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    nowhere = tmp_path / "nowhere"

    # Nothing listens there.
    temporal = f"127.0.0.1:{free_port()}"
    called = perdure if words == ("api",) else operate
    ended = called(*words, "--data-dir", str(nowhere), PERDURE_TEMPORAL_ADDRESS=temporal, PERDURE_PORT=str(free_port()))

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"perdure: There is no store at {nowhere}/perdure.db")
    assert not nowhere.exists()


@pytest.mark.parametrize("hiding", ["worker.py", "api/__init__.py", "workflows/__init__.py"])
def test_a_module_of_the_authors_that_hides_one_of_ours_is_named(tmp_path: Path, hiding: str) -> None:
    theirs = tmp_path / hiding
    theirs.parent.mkdir(exist_ok=True)
    theirs.touch()

    # As `perdure dev` starts its parts: the folder that it was started in comes first.
    ended = run(("worker",), environment={}, within=60, folder=tmp_path)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"perdure: {theirs} has the name of a module of Perdure's: rename it")


@pytest.mark.parametrize(
    "words",
    [
        ("sessions", "--limit", "-1"),
        ("sessions", "--limit", "9223372036854775807"),
        ("dead-letters", "--limit", "-5"),
        ("tail", "ses_1", "--start", "99999999999999999999"),
        ("tail", "ses_1", "--start", "-1"),
        ("sessions", "fork", "ses_1", "--turn", "0", "--step", "-1"),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_number_out_of_its_range_is_refused_with_the_range(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert operate("migrate", PERDURE_DATA_DIR=str(tmp_path)).returncode == 0

    ended = operate(*words, PERDURE_DATA_DIR=str(tmp_path))

    assert ended.returncode == 2
    assert "Invalid value for" in ended.stderr


def test_the_group_takes_the_folder_for_its_commands(tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")

    ended = operate("sessions", "--data-dir", str(tmp_path / "here"), "cancel", "s", PERDURE_DATA_DIR=elsewhere)

    assert f"There is no store at {tmp_path}/here/perdure.db" in ended.stderr


def test_other_users_cannot_read_the_store(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert perdure("migrate", "--data-dir", str(data)).returncode == 0

    with closing(sqlite3.connect(data / "perdure.db")) as reader:
        reader.execute("SELECT 1 FROM sessions").fetchall()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (data, *data.iterdir())}

    assert modes == {"data": 0o700, "perdure.db": 0o600, "perdure.db-wal": 0o600, "perdure.db-shm": 0o600}


def test_a_store_that_everybody_could_read_is_closed_to_them(tmp_path: Path) -> None:
    assert perdure("migrate", "--data-dir", str(tmp_path)).returncode == 0
    (tmp_path / "perdure.db").chmod(0o644)

    assert perdure("sessions", "--data-dir", str(tmp_path)).returncode == 0

    assert stat.S_IMODE((tmp_path / "perdure.db").stat().st_mode) == 0o640


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


async def test_sessions_are_found_by_their_tag_and_by_their_title(stack: Stack) -> None:
    async with stack.talk() as tagged, stack.talk() as other:
        await tagged.say("a needle in the hay", tags={"job": "sewing"})
        await other.say("only hay")
    environment = {name: value for name, value in stack.environment.items() if name.startswith("PERDURE_")}

    by_tag = perdure("sessions", "--tag", "job:sewing", **environment).stdout
    by_title = perdure("sessions", "--find", "NEEDLE", **environment).stdout
    refused = perdure("sessions", "--tag", "sewing", **environment)

    assert [line.split()[0] for line in by_tag.splitlines()] == [tagged.session_id]
    assert by_title == by_tag
    assert (refused.returncode, "like job:nightly" in refused.stderr) == (1, True)


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


async def test_a_session_is_not_started_where_no_worker_would_take_it_up(
    tmp_path: Path, temporal_server: TemporalServer
) -> None:
    environment = {
        "PERDURE_DATA_DIR": str(tmp_path),
        "PERDURE_DATABASE_URL": f"sqlite:///{tmp_path / 'test.db'}",
        "PERDURE_TEMPORAL_ADDRESS": temporal_server.address,
        "PERDURE_TASK_QUEUE": f"elsewhere-{tmp_path.name}",
    }
    session_id = f"ses_{uuid.uuid4().hex}"
    store = await open_store(environment["PERDURE_DATABASE_URL"])
    await store.migrate()
    await store.create_session(given.session(session_id))
    await store.commit(given.ending(session_id=session_id))
    await store.close()

    for how in ("--rebuild", "--retry", "--fail"):
        refused = operate("sessions", "repair", session_id, how, **environment)
        assert refused.returncode == 1
        assert f"No worker takes sessions from the task queue elsewhere-{tmp_path.name}-sessions." in refused.stderr
        assert "PERDURE_TASK_QUEUE" in refused.stderr
    compared = operate("sessions", "reconcile", **environment)
    assert f"{session_id}  it waits for a worker" in compared.stdout

    insisted = perdure("sessions", "repair", session_id, "--rebuild", "--yes", **environment)

    assert (insisted.returncode, insisted.stderr) == (0, "")
