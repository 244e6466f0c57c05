"""The wheel, as an author gets it: installed in an empty environment, with a new project.

What the wheel needs is linked from our own environment, which has it from the same names: no index is asked, and
nothing is unpacked and compiled again. `make chaos` has pip install all of it.
"""

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.talk import Talk, text

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the source archive, which so must hold all that a build needs."""
    target = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--outdir", str(target), str(ROOT)])
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module", params=["linked", pytest.param("installed", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with nothing but the wheel and what it needs."""
    home = tmp_path_factory.mktemp("venv")
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)])
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    linked = request.param == "linked"
    _run([*pip, "install", "--quiet", "--no-compile", *(["--no-deps"] if linked else []), str(wheel)])
    if linked:
        [packages] = home.glob("lib/python*/site-packages")
        for needed in _needs(wheel):
            _link(needed, packages)
    return python


def test_the_wheel_holds_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"perdure"}
    assert {"perdure/shells/worker.py", "perdure/shells/api/server.py", "perdure/py.typed"} <= set(names)
    assert _files("perdure", ".sql") <= set(names)
    # The console is served from there.
    console = {f"perdure/shells/{name}" for name in _files("api/console/static", "")}
    assert "perdure/shells/api/console/static/vendor/preact.LICENSE" in console
    assert console <= set(names)
    assert _files("perdure/cli/project/templates", ".in") <= set(names)


async def test_an_author_serves_the_agent_of_a_new_project(python: Path, tmp_path: Path) -> None:
    perdure = str(python.with_name("perdure"))
    _run([perdure, "init", str(tmp_path / "my-shop")])
    project = tmp_path / "my-shop"
    port = free_port()
    ports = ("--port", str(port), "--temporal-port", str(free_port()), "--ui-port", str(free_port()))
    # The console script, in the author's own folder, as they would call it.
    program = [perdure, "dev", "--agents", "my_shop.agent:agent", *ports]
    dev = Process("dev", ["env", "-C", str(project), *program], tmp_path / "dev.log", clean_environment())
    try:
        wait_until(lambda: "Perdure is ready." in dev.output or not dev.alive, "dev to be ready", 120)
        assert dev.alive, dev.output

        async with Talk(f"http://127.0.0.1:{port}") as talk:
            await talk.create('use refund {"order": "17", "amount": 45}')
            asked = await talk.until("input.requested")
            request = asked[-1]["data"]["requests"][0]["requestId"]
            await talk.until_boundary()
            await talk.send(inputResponses=[{"requestId": request, "optionId": "approve"}])
            events = await talk.until_boundary()
            page = await talk.http.get("/")
            [program] = re.findall(r'src="(console/[0-9a-f]+/main\.js)"', page.text)
            console = await talk.http.get(f"/{program}")

        assert (console.status_code, console.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        assert asked[0]["data"]["runtime"]["agentName"] == "my-shop"
        assert text(events) == "refund: Refunded 45.00."
        family = _of(project)
        assert len(family) >= 4
        assert dev.terminate() == 0
        wait_until(lambda: not family & _of(project), "all processes to end")
    finally:
        dev.close()


def _needs(wheel: Path) -> list[Distribution]:
    """What the wheel says it needs, and what that needs, as we have it."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        stated = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    due = [(Requirement(each), "") for each in stated]
    while due:
        requirement, extra = due.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        ours = distribution(requirement.name)
        assert requirement.specifier.contains(ours.version, prereleases=True), f"{requirement}, not {ours.version}"
        found[requirement.name.lower()] = ours
        for wanted in ("", *requirement.extras):
            if (ours.name, wanted) not in seen:
                seen.add((ours.name, wanted))
                due += [(Requirement(each), wanted) for each in ours.requires or []]
    return list(found.values())


def _link(needed: Distribution, packages: Path) -> None:
    for file in needed.files or []:
        # Programs are outside of the folder of packages.
        link = Path(os.path.normpath(packages / file))
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(Path(str(needed.locate_file(file))).resolve())


def _files(folder: str, suffix: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(f"*{suffix}") if path.is_file()}


def _of(folder: Path) -> set[int]:
    """The processes that work in this folder."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder and not _dead(entry):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def _dead(entry: Path) -> bool:
    return bool(re.search(r"\) Z ", (entry / "stat").read_text()))


def _run(command: list[str]) -> None:
    # Without this the checkout would be found instead of what was installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert ended.returncode == 0, ended.stdout + ended.stderr
