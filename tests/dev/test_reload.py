"""`perdure dev` loads changed code, and a broken edit changes nothing."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import httpx2
import pytest

from perdure.dev.reload import Snapshot, Sources, source_roots
from perdure.dev.supervisor import command
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.talk import Json, Talk, text, types

pytestmark = pytest.mark.chaos

LOADED = "The worker and the API run the new code"
REFUSED = "The new code is not loaded, and the old one goes on."

AGENT = '''
import asyncio
from pathlib import Path

from perdure import Agent, tool


async def first_waits(patient: bool) -> None:
    """The first version does not come back."""
    while patient and "VERSION" == "one":
        await asyncio.sleep(0.05)


@tool(effects="pure", timeout=240)
async def look(patient: bool = False, seconds: float = 0.0) -> str:
    """Look."""
    await first_waits(patient)
    await asyncio.sleep(seconds)
    return "VERSION"


@tool(timeout=240)
async def pay(patient: bool = False) -> str:
    """Pay, at most once."""
    await first_waits(patient)
    return "paid VERSION"


@tool(effects="pure", timeout=120)
async def watch() -> str:
    """Wait for a file."""
    while not Path("go").exists():
        await asyncio.sleep(0.05)
    return "VERSION"


agent = Agent(name="mine", instructions="Look.", tools=[look, pay, watch])
'''


class Project:
    """A folder with an agent, and the `perdure dev` that serves it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        self.write("one")
        self.data = self.folder / ".perdure"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        ports = ("--port", str(port), "--temporal-port", str(free_port()), "--ui-port", str(free_port()))
        program = ["env", "-C", str(self.folder), *command("dev", "--agents", "mine:agent", *ports, *options)]
        self.process = Process("dev", program, folder / "dev.log", clean_environment())

    @property
    def output(self) -> str:
        return self.process.log.read_text()

    def ready(self) -> "Project":
        wait_until(lambda: "Perdure is ready." in self.output or not self.process.alive, "dev to be ready", 120)
        assert self.process.alive, self.output
        return self

    def write(self, version: str, file: str = "mine.py") -> None:
        self.save(AGENT.replace("VERSION", version), file)

    def save(self, content: str, file: str = "mine.py") -> None:
        """As editors do: the file is never half there."""
        (self.folder / f"{file}.new").write_text(content)
        (self.folder / f"{file}.new").replace(self.folder / file)

    def loaded(self, times: int = 1) -> None:
        wait_until(lambda: self.output.count(LOADED) >= times, "the new code to be loaded")

    def refused(self, times: int = 1) -> None:
        wait_until(lambda: self.output.count(REFUSED) >= times, "the new code to be refused")

    def pid(self, part: str) -> int:
        return int((self.data / f"{part}.ready").read_text())


Start = Callable[..., Project]


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    started: list[Project] = []

    def start(*options: str) -> Project:
        started.append(Project(tmp_path, *options))
        return started[-1].ready()

    yield start
    for project in started:
        project.process.close()


async def test_a_turn_in_flight_ends_once_and_the_next_one_runs_the_new_code(start: Start) -> None:
    project = start()
    async with Talk(project.url) as talk, Talk(project.url) as reader:
        await talk.create("use watch")
        await talk.until("actions.requested")
        reader.session_id = talk.session_id
        read = asyncio.create_task(read_on(reader))

        project.write("two")
        await asyncio.to_thread(project.loaded)
        (project.folder / "go").touch()
        events = await talk.until_boundary()
        seen, breaks = await read
        later = await talk.say("use look")

    # It ends in the old worker, or in the new one if this machine has taken more than ten seconds for the rest.
    assert text(events) in ("watch: one", "watch: two")
    assert types(events).count("turn.completed") == 1
    assert types(events).count("action.result") == 1
    assert later == "look: two"
    assert "Changed: mine.py." in project.output
    assert "starting it again" not in project.output
    # A reader finds the API again at its port, and goes on where it was.
    assert (seen, breaks > 0) == (events, True)


async def read_on(talk: Talk) -> tuple[list[Json], int]:
    """The events up to the boundary, and how often the stream broke off before it."""
    seen: list[Json] = []
    breaks = 0
    while True:
        with contextlib.suppress(httpx2.TransportError):
            async for event in talk.events(len(seen)):
                seen.append(event)
                if event["type"] == "session.waiting":
                    return seen, breaks
        breaks += 1
        await asyncio.sleep(0.05)


async def test_calls_that_take_too_long_to_wait_for_go_on_by_their_effects(start: Start) -> None:
    project = start()
    async with Talk(project.url, timeout=120) as one, Talk(project.url, timeout=120) as other:
        await one.create('use look {"patient": true}')
        await other.create('use pay {"patient": true}')
        await one.until("actions.requested")
        await other.until("actions.requested")

        project.write("two")
        (looked, _), (paid, _) = await asyncio.gather(read_on(one), read_on(other))

    assert text(looked) == "look: two"
    assert "TOOL_OUTCOME_UNKNOWN" in json.dumps([each for each in paid if each["type"] == "action.result"])
    assert [types(each).count("turn.completed") for each in (looked, paid)] == [1, 1]


async def test_a_broken_edit_changes_nothing_and_the_next_save_mends_it(start: Start) -> None:
    project = start()
    worker, api = project.pid("worker"), project.pid("api")

    async with Talk(project.url) as talk:
        project.save("def broken(:\n")
        await asyncio.to_thread(project.refused)
        assert "SyntaxError" in project.output
        assert "mine.py, line 1" in project.output
        assert await talk.say("use look") == "look: one"

        project.save(AGENT.replace('name="mine"', 'name="Not A Name"'))
        await asyncio.to_thread(project.refused, 2)
        assert "Not A Name" in project.output
        assert await talk.say("use look") == "look: one"
        assert (project.pid("worker"), project.pid("api")) == (worker, api)

        project.write("two")
        await asyncio.to_thread(project.loaded)
        assert await talk.say("use look") == "look: two"


@pytest.mark.slow
async def test_a_broken_edit_that_is_undone_needs_no_new_processes(start: Start) -> None:
    project = start()
    worker = project.pid("worker")

    project.save("raise RuntimeError('half done')\n")
    project.refused()
    project.write("one")
    wait_until(lambda: "The code is again what" in project.output, "the undone edit to be noticed")

    assert project.pid("worker") == worker
    assert "half done" in project.output
    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: one"


@pytest.mark.slow
async def test_refused_code_that_is_saved_again_as_it_is_is_checked_again(start: Start) -> None:
    project = start()
    project.save(AGENT.replace("VERSION", "two") + "Path('prompt.txt').read_text()\n")
    project.refused()
    code = (project.folder / "mine.py").read_text()

    (project.folder / "prompt.txt").touch()
    project.save(code)
    project.loaded()

    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: two"


@pytest.mark.slow
async def test_code_that_is_half_saved_while_its_worker_starts_is_loaded_once_it_is_whole(start: Start) -> None:
    project = start()
    # As if the file were broken after the check, when the worker reads it.
    code = (
        AGENT.replace("VERSION", "two") + "import sys\nassert '--check' in sys.argv or Path('whole').exists(), 'half'\n"
    )
    project.save(code)
    project.refused()
    assert "half" in project.output

    (project.folder / "whole").touch()
    project.save(code)
    project.loaded()

    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: two"


@pytest.mark.slow
def test_a_worker_that_goes_on_because_the_new_one_does_not_start_can_be_killed(start: Start) -> None:
    project = start().ready()
    old = project.pid("worker")
    project.save(AGENT + "\nimport sys\nif '--check' not in sys.argv: raise SystemExit('only to look at')\n")
    project.refused()

    killed = subprocess.run(
        command("dev", "--kill", "worker", "--data-dir", str(project.data)),
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert killed.stdout == f"Killed the worker, process {old}.\n", killed.stderr


async def test_many_saves_at_once_are_one_restart(start: Start) -> None:
    project = start()

    for number in range(20):
        # Of one length and mostly of one second, which is how Python tells what it has compiled.
        project.write(f"v{number:02}")
        await asyncio.sleep(0.04)
    project.loaded()

    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: v19"
    assert project.output.count("Changed: ") == 1


async def test_a_save_of_the_same_length_in_the_same_second_is_loaded(start: Start) -> None:
    project = start()
    file = project.folder / "mine.py"
    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: one"
        before = file.stat().st_mtime

        project.write("two")
        os.utime(file, (before, before))
        await asyncio.to_thread(project.loaded)

        assert await talk.say("use look") == "look: two"


@pytest.mark.slow
async def test_a_worker_that_dies_while_the_code_is_broken_comes_back_with_the_mend(start: Start) -> None:
    project = start()
    project.save("def broken(:\n")
    project.refused()

    os.kill(project.pid("worker"), 9)
    wait_until(lambda: "The worker did not start" in project.output, "the worker to fail")
    project.write("two")
    wait_until(lambda: LOADED in project.output or "The worker is back" in project.output, "the worker to be back")

    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: two"


async def test_without_reload_the_code_stays(start: Start) -> None:
    project = start("--no-reload")
    async with Talk(project.url) as talk:
        assert await talk.say("use look") == "look: one"
        project.write("two")
        assert await talk.say('use look {"seconds": 3}') == "look: one"

    assert "Changed" not in project.output


def test_only_the_projects_own_code_is_looked_at(tmp_path: Path) -> None:
    own = ("mine.py", "package/__init__.py", "package/deep/tool.py")
    foreign = (".venv/x.py", "node_modules/x.py", "package/__pycache__/x.py", ".git/x.py", "env/x.py", "data/x.py")
    for name in (*own, *foreign, "notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()

    found = Sources([tmp_path], tmp_path / "data").look()

    assert sorted(found.files) == [str(tmp_path / name) for name in own]
    assert found.complete


def test_a_file_that_is_written_without_a_change_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    sources = Sources([tmp_path], tmp_path / "data")
    before = sources.look()

    os.utime(tmp_path / "mine.py")
    touched = sources.look()
    (tmp_path / "mine.py").write_text("x = 2\n")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "other.py").touch()
    changed = sources.look()

    assert touched.changed_since(before) == []
    assert changed.changed_since(before) == [str(tmp_path / "mine.py"), str(tmp_path / "new" / "other.py")]


def test_a_folder_that_is_no_project_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.dev.reload._MOST_FOLDERS", 10)
    for number in range(20):
        (tmp_path / f"a{number:02}" / "deep").mkdir(parents=True)
    (tmp_path / "mine.py").touch()

    found = Sources([tmp_path], tmp_path / "data").look()

    assert not found.complete
    assert list(found.files) == [str(tmp_path / "mine.py")]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    found: list[Snapshot] = []

    looks = threading.Thread(target=lambda: found.append(Sources([tmp_path], tmp_path / "data").look()), daemon=True)
    looks.start()
    looks.join(10)

    assert [set(each.files) for each in found] == [{str(tmp_path / "agent.py")}]


def test_a_folder_that_links_to_itself_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "mine.py").symlink_to("nowhere")

    assert Sources([tmp_path], tmp_path / "data").look().files == {}


def test_the_folders_of_the_agents_are_watched_and_ours_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere" / "their_agents"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").touch()
    (elsewhere / "one.py").write_text("x = 1\n")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(sys, "path", [str(elsewhere.parent), *sys.path])
    monkeypatch.chdir(here)
    __import__("their_agents.one")

    roots = source_roots("their_agents.one:x,perdure.agents.demo:agent,pydantic:x,nowhere:x")

    assert roots == (elsewhere, here)
