"""`perdure init`: a project that works as it is, or nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.cli.project import scaffold
from perdure.cli.project.scaffold import TEMPLATES, FolderInUse, create, init, names_for
from perdure.errors import Invalid
from tests.support import commands
from tests.support.processes import clean_environment

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each template."""
    folder = tmp_path_factory.mktemp("projects")
    for template in TEMPLATES:
        create(folder / f"my-{template}", template)
    return folder


def run(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        # The tests of the project run by themselves, and not as a part of ours.
        env={name: value for name, value in clean_environment().items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tests_of_a_new_project_pass(projects: Path, template: str) -> None:
    said = run("pytest", "-q", "-p", "no:cacheprovider", folder=projects / f"my-{template}")

    assert re.search(r"\d+ passed", said)
    assert "warning" not in said


def test_new_projects_have_no_lint_and_no_wrong_types(projects: Path) -> None:
    roots = [{"root": f"my-{template}"} for template in TEMPLATES]
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "executionEnvironments": roots}
    (projects / "pyrightconfig.json").write_text(json.dumps(config))

    for template in TEMPLATES:
        run("ruff", "check", "--no-cache", ".", folder=projects / f"my-{template}")
        run("ruff", "format", "--no-cache", "--check", ".", folder=projects / f"my-{template}")
    said = run("pyright", "--pythonpath", sys.executable, folder=projects)

    assert said.startswith("0 errors, 0 warnings")


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_is_left_to_fill_in(projects: Path, template: str) -> None:
    files = [path for path in (projects / f"my-{template}").rglob("*") if path.is_file() and path.suffix != ".pyc"]

    assert files
    assert [str(path) for path in files if "__module__" in str(path) or path.suffix == ".in"] == []
    assert [str(path) for path in files if re.search(r"\{\{\w+\}\}", path.read_text())] == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_commands_of_its_readme_are_ours(projects: Path, template: str) -> None:
    page = (projects / f"my-{template}" / "README.md").read_text()
    programs = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    named = {tuple(words.split()) for words in re.findall(r"^perdure ([a-z-]+)", programs, re.MULTILINE)}

    assert ("dev",) in named
    for words in named:
        done = commands.perdure(*words, "--help", environment=clean_environment())
        assert done.returncode == 0, words
    agents = set(re.findall(r"--agents (\S+)", programs))
    assert agents == {f"my_{template.replace('-', '_')}.agent:agent"}


@pytest.fixture
def compose(projects: Path) -> dict[str, Any]:
    return yaml.safe_load((projects / "my-approvals" / "docker-compose.yml").read_text())


def test_its_containers_are_those_of_the_product(projects: Path, compose: dict[str, Any]) -> None:
    """What is in two places must not drift apart."""
    ours = yaml.safe_load((ROOT / "docker-compose.temporal.yml").read_text())["services"]
    theirs = compose["services"]

    for name in ("postgres", "temporal-schema", "temporal", "temporal-namespace", "temporal-ui"):
        assert theirs[name] == ours[name], name
    for file in ("schema.sh", "namespace.sh", "dynamicconfig.yaml"):
        copied = (projects / "my-approvals" / "deploy" / "temporal" / file).read_text()
        assert copied == (ROOT / "deploy" / "temporal" / file).read_text()
    runtime = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert (projects / "my-approvals" / "Dockerfile").read_text().rpartition("\nFROM ")[2] == runtime


def test_its_containers_serve_its_agent_and_have_no_default_secret(projects: Path, compose: dict[str, Any]) -> None:
    ours = yaml.safe_load((ROOT / "docker-compose.temporal.yml").read_text())["services"]
    theirs = compose["services"]

    # What is watched by profile is no part of a beginning.
    assert set(theirs) == {name for name, each in ours.items() if "profiles" not in each} - {"proxy"}
    for name in ("migrate", "worker", "api"):
        environment = theirs[name]["environment"]
        left = ("PERDURE_AGENTS", "PERDURE_PUBLIC_URL", "PERDURE_METRICS_", "PERDURE_TELEMETRY_", "OTEL_")
        same = {key: value for key, value in ours[name]["environment"].items() if not key.startswith(left)}
        assert environment == {**same, "PERDURE_AGENTS": "my_approvals.agent:agent"}
        assert {key: theirs[name][key] for key in ("command", "depends_on", "cap_drop", "read_only")} == {
            key: ours[name][key] for key in ("command", "depends_on", "cap_drop", "read_only")
        }
    assert all(port.startswith("127.0.0.1:") for each in theirs.values() for port in each.get("ports", ()))
    example = (projects / "my-approvals" / ".env.example").read_text()
    assert all(f"\n{name}=\n" in example for name in ("POSTGRES_PASSWORD", "PERDURE_SECRET", "PERDURE_API_KEYS"))


@pytest.mark.parametrize(
    ("folder", "module"),
    [
        ("My Shop", "my_shop"),
        ("café-2", "cafe_2"),
        ("Größe 1", "grosse_1"),
        ("2nd.try", "agent_2nd_try"),
        ("class", "class_agent"),
        ("api", "api_agent"),
        ("worker", "worker_agent"),
        ("json", "json_agent"),
        ("pydantic", "pydantic_agent"),
        ("perdure", "perdure_agent"),
        ("__", "my_agent"),
        ("茶", "my_agent"),
        ("a" * 90, "a" * 40),
    ],
)
def test_the_names_are_made_of_the_folders(folder: str, module: str) -> None:
    names = names_for(folder)

    assert (names.module, names.name) == (module, module.replace("_", "-"))
    assert names.module.isidentifier()


def test_what_it_says_can_be_pasted_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    init(Path("My Shop"), "minimal")

    assert "\n  cd 'My Shop'\n" in capsys.readouterr().out


@pytest.mark.parametrize("begun", [(), (".git", ".venv")])
def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: tuple[str, ...]) -> None:
    here = tmp_path / "shop"
    here.mkdir()
    for each in begun:
        (here / each).mkdir()
    monkeypatch.chdir(here)
    inode = here.stat().st_ino

    create(Path("."), "minimal")

    assert here.stat().st_ino == inode
    assert (here / "shop" / "agent.py").exists()
    assert not list(here.glob(".perdure-init-*"))


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(FolderInUse, match=r"is not empty \(it has notes.txt\)"):
        create(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "shop").write_text("mine")

    with pytest.raises(FolderInUse, match="is a file"):
        create(tmp_path / "shop")

    assert (tmp_path / "shop").read_text() == "mine"


def test_an_unknown_template_names_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as refused:
        create(tmp_path / "shop", "../minimal")

    assert all(f"  {template} " in str(refused.value) for template in TEMPLATES)
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_is_full_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    write = Path.write_text

    def full(self: Path, *arguments: Any, **named: Any) -> int:
        if self.name == "README.md":
            raise OSError(28, "No space left on device")
        return write(self, *arguments, **named)

    if exists:
        (tmp_path / "shop").mkdir()
    monkeypatch.setattr(Path, "write_text", full)

    with pytest.raises(OSError, match="No space left"):
        create(tmp_path / "shop")

    assert [path.name for path in tmp_path.rglob("*")] == (["shop"] if exists else [])


@pytest.mark.parametrize("exists", [True, False])
def test_what_another_one_makes_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    target = tmp_path / "shop"
    if exists:
        target.mkdir()
    rendered = scaffold._rendered  # pyright: ignore[reportPrivateUsage]

    def slow(*arguments: Any) -> Any:
        yield from rendered(*arguments)
        target.mkdir(exist_ok=True)
        (target / "pyproject.toml").write_text("theirs")

    monkeypatch.setattr(scaffold, "_rendered", slow)

    with pytest.raises(FolderInUse, match="meanwhile"):
        create(target)

    assert [path.name for path in target.rglob("*")] == ["pyproject.toml"]
    assert (target / "pyproject.toml").read_text() == "theirs"


def test_the_files_have_the_modes_of_the_user(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        create(tmp_path / "shop")
    finally:
        os.umask(before)

    assert (tmp_path / "shop").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "shop" / "pyproject.toml").stat().st_mode & 0o777 == 0o644
