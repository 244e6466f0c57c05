"""`perdure dev`: everything starts together, survives crashes, and leaves nothing behind."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic_ai.toolsets import FunctionToolset

from perdure import Agent, AgentRegistry
from perdure.dev.machine import Occupied, kill, listed, locked
from perdure.dev.supervisor import command
from perdure.dev.temporal_server import binary, listens
from perdure.runtime.local import read_api_url, read_temporal_address, write_api_url, write_temporal_address
from perdure.settings import Settings
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.talk import Talk, text

pytestmark = pytest.mark.chaos


class Dev:
    """A `perdure dev` of one test."""

    def __init__(self, directory: Path, data: Path, port: int | None = None, **environment: str) -> None:
        self.port = port or free_port()
        self.data = data
        self.temporal_port = free_port()
        ports = ("--port", str(self.port), "--temporal-port", str(self.temporal_port), "--ui-port", str(free_port()))
        # What somebody writes in this checkout meanwhile is no part of the test.
        program = command("dev", *ports, "--data-dir", str(data), "--no-reload")
        log = directory / f"dev-{self.temporal_port}.log"
        self.process = Process("dev", program, log, {**clean_environment(), **environment})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> "Dev":
        wait_until(lambda: "Perdure is ready." in self.process.output or not self.process.alive, "dev to be ready", 120)
        assert self.process.alive, self.process.output
        return self

    def part(self, name: str) -> int:
        return int((self.data / f"{name}.ready").read_text())

    def family(self) -> set[int]:
        """All processes that descend from it."""
        found = {self.process.pid}
        while children := {pid for pid, parent in _parents().items() if parent in found} - found:
            found |= children
        return found


DevFactory = Callable[..., Dev]


@pytest.fixture
def start_dev(tmp_path: Path) -> Generator[DevFactory]:
    started: list[Dev] = []

    def start(data: Path = tmp_path / "data", port: int | None = None, **environment: str) -> Dev:
        started.append(Dev(tmp_path, data, port, **environment))
        return started[-1]

    yield start
    for dev in started:
        dev.process.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Dev]:
    """One to which nothing happens, for all that only look at it."""
    directory = tmp_path_factory.mktemp("dev")
    dev = Dev(directory, directory / "data")
    try:
        yield dev.ready()
    finally:
        dev.process.close()


async def test_a_session_is_here_again_at_the_next_start(start_dev: DevFactory) -> None:
    dev = start_dev().ready()
    assert "agent        demo (model demo): roll_dice, remember_note, current_time" in dev.process.output
    async with Talk(dev.url) as talk:
        assert "hello" in await talk.say("hello")
    assert dev.process.terminate() == 0

    again = start_dev().ready()
    async with Talk(again.url) as later:
        later.session_id, later.token, later.cursor = talk.session_id, talk.token, talk.cursor
        assert "still there" in await later.say("still there?")


def test_the_tools_of_a_toolset_are_listed_where_it_knows_them() -> None:
    def look() -> None: ...

    agent = Agent("mixed", tools=[look, FunctionToolset([parts_of]), FunctionToolset([]).prefixed("far")])

    assert listed(AgentRegistry([agent])) == "  agent        mixed (model demo): look, parts_of, PrefixedToolset"


def test_an_agent_that_callers_cannot_start_is_listed_as_a_subagent() -> None:
    registry = AgentRegistry([Agent("boss", subagents=[Agent("helper"), Agent("clerk")]), Agent("other")])

    lines = listed(registry).split("\n")

    assert [line.split()[:2] for line in lines] == [
        ["agent", "boss"],
        ["subagent", "helper"],
        ["subagent", "clerk"],
        ["agent", "other"],
    ]


def parts_of(thing: str) -> str:
    """Say what it is made of."""
    return thing


async def test_with_durable_all_databases_wait_for_the_disk(start_dev: DevFactory) -> None:
    dev = start_dev(PERDURE_DURABLE="true").ready()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in dev.family()]
    parts = [Path(f"/proc/{dev.part(name)}/environ").read_bytes().split(b"\0") for name in ("worker", "api")]
    async with Talk(dev.url) as talk:
        await talk.create("hello")
        events = await talk.until_boundary()

    (temporal,) = [words for words in commands if b"start-dev" in words]
    assert b"synchronous=2" in temporal
    assert all(b"PERDURE_DURABLE=true" in environment for environment in parts)
    assert events[-1]["type"] == "session.waiting"


async def test_its_worker_can_be_killed_in_the_middle_of_a_tool(start_dev: DevFactory) -> None:
    dev = start_dev().ready()
    worker = dev.part("worker")
    assert f"process {worker};" in dev.process.output
    async with Talk(dev.url) as talk:
        await talk.create("wait 3 seconds")
        async for event in talk.events():
            if event["type"] == "actions.requested":
                break
        killed = kill(dev.data, "worker")

        events = await talk.until_boundary()

    assert killed == f"Killed the worker, process {worker}."
    assert "Waited 3 seconds." in text(events)


def test_nothing_is_killed_where_no_dev_runs(running: Dev, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "worker.ready").write_text(str(running.part("worker")))

    for folder in (tmp_path / "other", tmp_path / "nowhere"):
        with pytest.raises(Occupied, match="No `perdure dev` runs"):
            kill(folder, "worker")


def test_other_users_cannot_read_its_files(running: Dev) -> None:
    files = (running.data, *running.data.rglob("*"))
    open_to_others = [path for path in files if path.stat().st_mode & 0o077]

    # A process id and an address are no secrets.
    assert [path for path in open_to_others if path.suffix != ".ready"] == []


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder.parent)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The data directory of an older build: every user may read it."""
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    for name in ("perdure.db", "temporal.db", "temporal.db-wal", "secret", "worker.ready", "logs/api.1.log"):
        (data / name).touch()
        (data / name).chmod(0o644)
    for folder in (data, data / "logs"):
        folder.chmod(0o755)
    return data


def test_what_an_older_build_let_everybody_read_is_closed_to_them(old: Path) -> None:
    with locked(old):
        assert modes(old) == {
            "data": 0o700,
            "data/dev.lock": 0o600,
            "data/logs": 0o700,
            "data/logs/api.1.log": 0o640,
            **{f"data/{name}": 0o640 for name in ("perdure.db", "temporal.db", "temporal.db-wal", "secret")},
            "data/worker.ready": 0o640,
        }


def test_a_folder_that_holds_other_things_keeps_its_rights(old: Path) -> None:
    for stray in ("README.md", "logs/other.txt"):
        (old / stray).touch()
        (old / stray).chmod(0o644)

    with locked(old):
        after = modes(old)

    assert {name for name, mode in after.items() if mode & 0o007} == {
        "data",
        "data/README.md",
        "data/logs",
        "data/logs/other.txt",
    }


def test_a_group_keeps_the_rights_that_it_was_given(old: Path) -> None:
    old.chmod(0o770)
    (old / "temporal.db").chmod(0o660)

    with locked(old):
        after = modes(old)

    assert (after["data"], after["data/temporal.db"]) == (0o770, 0o660)


def test_an_operators_commands_find_its_temporal(start_dev: DevFactory) -> None:
    dev = start_dev().ready()

    said = subprocess.run(
        command("sessions", "reconcile", "--data-dir", str(dev.data)),
        env={**clean_environment(), "PERDURE_TEMPORAL_NAMESPACE": "of-another-temporal"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert said.stdout == "The store and Temporal agree.\n", said.stderr


def test_a_chat_finds_the_api_of_the_folder_at_any_port(running: Dev) -> None:
    said = subprocess.run(
        command("chat"),
        env={**clean_environment(), "PERDURE_DATA_DIR": str(running.data)},
        input="hello there\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert "hello there" in said.stdout, said.stderr


def test_a_chat_is_not_led_to_an_api_that_has_ended(tmp_path: Path) -> None:
    with locked(tmp_path):
        write_api_url(tmp_path, "http://127.0.0.1:1")
        assert read_api_url(tmp_path) == "http://127.0.0.1:1"

    assert read_api_url(tmp_path) is None
    assert read_api_url(tmp_path / "nowhere") is None


def test_a_port_that_cannot_be_is_refused_as_an_option() -> None:
    said = subprocess.run(
        command("dev", "--port", "99999"),
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert said.returncode == 2
    assert "65535" in said.stderr


def test_an_operator_of_another_store_is_not_led_to_its_temporal(tmp_path: Path) -> None:
    folder = Settings(data_dir=tmp_path)
    elsewhere = Settings(data_dir=tmp_path, database_url=SecretStr("postgresql://somewhere/else"))

    with locked(tmp_path):
        write_temporal_address(folder, "127.0.0.1:1")
        assert (read_temporal_address(folder), read_temporal_address(elsewhere)) == ("127.0.0.1:1", None)
        write_temporal_address(elsewhere, "127.0.0.1:2")
        assert (read_temporal_address(folder), read_temporal_address(elsewhere)) == (None, "127.0.0.1:2")

    assert read_temporal_address(elsewhere) is None


def test_temporal_is_given_none_of_our_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a secret")
    dev = Dev(tmp_path, tmp_path / "data")
    try:
        dev.ready()
        environments = [
            (
                Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(),
                Path(f"/proc/{pid}/environ").read_bytes(),
            )
            for pid in dev.family()
        ]
    finally:
        dev.process.close()

    (temporal,) = (environment for program, environment in environments if program == binary())
    assert b"a secret" not in temporal
    # What is ours has them: models need keys.
    assert any(b"a secret" in environment for _, environment in environments)


async def test_a_killed_worker_and_a_killed_api_come_back(start_dev: DevFactory) -> None:
    dev = start_dev().ready()
    async with Talk(dev.url) as talk:
        await talk.say("hello")
        for name in ("worker", "api"):
            os.kill(dev.part(name), signal.SIGKILL)
            wait_until(lambda name=name: f"The {name} is back." in dev.process.output, f"the {name} to be back")

        await talk.send("and again")

        assert "and again" in text(await talk.until_boundary())
    assert "The worker was killed by SIGKILL; starting it again." in dev.process.output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_is_left_however_it_ends(start_dev: DevFactory, how: signal.Signals) -> None:
    dev = start_dev().ready()
    family = dev.family()
    assert len(family) >= 4

    dev.process.signal(how)

    dev.process.wait()
    wait_until(lambda: not family & _parents().keys(), "all of its processes to end")


@pytest.mark.alone
async def test_a_reader_does_not_keep_it_from_ending(start_dev: DevFactory) -> None:
    dev = start_dev().ready()
    async with Talk(dev.url) as talk:
        await talk.create("hello")
        async for event in talk.events():
            if event["type"] == "session.waiting":
                break

        assert dev.process.terminate(within=8) == 0


def test_a_stale_lock_is_no_obstacle(start_dev: DevFactory) -> None:
    first = start_dev().ready()
    family = first.family()
    first.process.kill()
    wait_until(lambda: not family & _parents().keys(), "all of its processes to end")

    start_dev(port=first.port).ready()


def test_a_second_dev_on_the_same_data_is_refused(running: Dev, start_dev: DevFactory) -> None:
    second = start_dev(running.data)

    assert second.process.wait() == 1
    assert re.fullmatch(r"perdure: Another `perdure dev` runs on .*\n", second.process.output)
    assert running.process.alive


def test_a_busy_port_is_refused_and_nothing_stays(running: Dev, start_dev: DevFactory) -> None:
    second = start_dev(port=running.port)

    assert second.process.wait() == 1
    assert second.process.output == f"perdure: Port {running.port} is taken; choose another one with --port.\n"
    assert listens("127.0.0.1", running.port)


def test_an_agent_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    ports = [str(free_port()) for _ in range(3)]
    options = ("--port", ports[0], "--temporal-port", ports[1], "--ui-port", ports[2], "--data-dir", str(tmp_path))
    program = command("dev", "--agents", "no_such_module:agent", *options)

    dev = Process("dev", program, tmp_path / "dev.log", clean_environment())

    assert dev.wait() == 1
    assert "There is no module 'no_such_module'" in dev.output
    assert "Traceback" not in dev.output


def test_a_missing_key_of_a_model_is_reported_before_the_first_message(start_dev: DevFactory) -> None:
    dev = start_dev(PERDURE_MODEL="anthropic:claude")

    assert dev.process.wait() == 1
    assert "Agent 'demo': The model anthropic:claude cannot be used. Set ANTHROPIC_API_KEY" in dev.process.output
    assert "Perdure is ready." not in dev.process.output


def test_finished_workflows_are_kept_for_ninety_days(running: Dev) -> None:
    question = ("operator", "namespace", "describe", "-n", "default", "-o", "json")
    address = f"127.0.0.1:{running.temporal_port}"
    shown = subprocess.run([binary(), *question, "--address", address], check=True, capture_output=True, text=True)

    assert json.loads(shown.stdout)["config"]["workflowExecutionRetentionTtl"] == "7776000s"


def _parents() -> dict[int, int]:
    """All processes that run, with their parents."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found
