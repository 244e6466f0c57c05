"""The docs say what is there."""

import ast
import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_args

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import perdure
import perdure.client
import perdure.testing
from perdure.cli.commands import app
from perdure.protocol.events import EVENT_EXPIRED, SESSION_STALLED, BesideType, EventType
from perdure.protocol.stream_policy import EVENT_EXCLUDED
from perdure.runtime.reports.why import WhyCode
from perdure.settings import Settings
from perdure.testing import ScriptedModel, call, play
from tests import rooms
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from workflows.patches import PATCHES

#: Members that need a docstring.
DESCRIBED = (FunctionType, property, classmethod, staticmethod)
ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name: str) -> None:
    assert f"PERDURE_{name.upper()}" in (ROOT / "docs" / "settings.md").read_text()


def test_every_event_is_documented_and_no_other() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    known = {
        EVENT_EXCLUDED,
        EVENT_EXPIRED,
        SESSION_STALLED,
        *(value for name, value in vars(EventType).items() if name.isupper()),
        *(value for name, value in vars(BesideType).items() if name.isupper()),
    }

    assert set(re.findall(r"^\| `([a-z]+\.[a-z._]+)` \|", page, re.MULTILINE)) == known


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    group = get_command(app)
    assert isinstance(group, TyperGroup)

    assert [name for name in group.commands if not re.search(rf"^\|.*`perdure {name}[ `]", page, re.MULTILINE)] == []


def test_every_reason_why_a_session_does_not_move_is_documented() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    codes = [code for part in get_args(WhyCode) for code in get_args(part)]

    assert {"ended", "working"} <= set(codes)
    assert [code for code in codes if not re.search(rf"^\| .*`{code}`.* \|", page, re.MULTILINE)] == []


#: Their texts in capitals are names of variables of the environment.
NO_CODES = ("perdure/settings.py", "perdure/cli/doctor/", "perdure/dev/", "perdure/telemetry/setup.py")
#: Variables of the environment that are not ours.
VARIABLES = {"LD_LIBRARY_PATH", "MONTY_BIN", "NO_COLOR"}


def codes() -> Iterator[str]:
    """Every code in the product: a text in capitals, as `STEP_TIMEOUT`, or with which a delivery is refused.

    Of a code that is put together, as `TURN_BUDGET_REACHED`, it is the end.
    """
    for module in rooms.product(ROOT):
        if str(module.path).startswith(NO_CODES):
            continue
        for node in ast.walk(module.tree):
            match node:
                case ast.Constant(value=str(text)) if re.fullmatch(r"(?!PERDURE_)_?[A-Z]+(_[A-Z]+)+", text):
                    yield text
                case ast.Call() if ast.unparse(node.func).lower().endswith("refuse"):
                    given = [each.value for each in node.args if isinstance(each, ast.Constant)]
                    yield from (each for each in given if isinstance(each, str) and each.isidentifier())
                case _:
                    pass


def test_every_code_is_documented() -> None:
    section = (ROOT / "docs" / "events.md").read_text().partition("\n## Codes\n")[2]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    documented = {code for cell in cells for code in re.findall(r"`(\w+)`", cell)}

    found = sorted(set(codes()) - VARIABLES)
    assert [code for code in found if not any(each.endswith(code) for each in documented)] == []


def test_every_patch_is_documented_as_it_is_listed() -> None:
    table = (ROOT / "docs" / "deploying.md").read_text().partition("### Patches")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)

    listed = [(each.id, each.workflow, str(each.since), str(each.may_go), each.before) for each in PATCHES]
    assert sorted(rows) == sorted(listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]

    assert [link for link in local if not (page.parent / link).exists()] == []


def importable() -> list[tuple[ModuleType, str]]:
    """What authors import, by module and name."""
    return [(module, name) for module in (perdure, perdure.client, perdure.testing) for name in module.__all__]


def test_the_reference_lists_what_authors_import() -> None:
    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)

    assert {name for _, name in importable()} <= {path.rpartition(".")[2] for path in listed}


@pytest.mark.parametrize(("module", "name"), importable(), ids=lambda each: getattr(each, "__name__", each))
def test_what_authors_import_has_a_docstring(module: ModuleType, name: str) -> None:
    exported = getattr(module, name)
    if not isinstance(exported, type):
        # An alias of types cannot hold one when the program runs.
        assert exported.__doc__
        return
    members = {each: value for each, value in vars(exported).items() if not each.startswith("_")}
    described = {each: value.__doc__ for each, value in members.items() if isinstance(value, DESCRIBED)}

    # A dataclass without a docstring is given its signature for one.
    assert not (exported.__doc__ or f"{name}(").startswith(f"{name}(")
    assert [each for each, docstring in described.items() if not docstring] == []


def blocks(page: str) -> list[str]:
    """The Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def definitions(page: str) -> dict[str, Any]:
    """What all the Python of a page defines, run in order."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(block, names)
    return names


async def test_the_agents_of_the_authors_guide_work() -> None:
    guide = definitions("authoring.md")

    await guide["test_the_shop_adds_tea"]()
    guide["test_older_wishes_are_kept"]()
    await guide["test_a_large_refund_is_asked_for"]()
    await guide["test_the_editor_asks_the_researcher"]()
    await guide["test_the_clerk_finds_orders"]()

    advised = await play(
        guide["advisor"],
        "What do you recommend?",
        mode="task",
        model=ScriptedModel([call("final_output", sku="tea", reason="It is raining.")]),
    )
    assert advised.result == {"sku": "tea", "reason": "It is raining."}


async def test_the_runs_of_their_guide_work() -> None:
    guide = definitions("runs.md")

    await guide["test_a_night_is_counted_and_told"]()
    await guide["test_nothing_is_sent_twice"]()
    await guide["test_a_release_is_asked_for"]()


async def test_the_program_of_the_guide_of_runs_works(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(apis=0, agents="examples.nightly:everything")
    for name, value in stack.environment.items():
        if name.startswith("PERDURE_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("PERDURE_AGENTS")
    guide = definitions("runs.md")

    async with asyncio.timeout(2 * PATIENCE):
        first = await guide["one_night"]("2027-01-31")
        assert (first["total"], await guide["one_night"]("2027-01-31")) == (42, first)
        async with perdure.connect() as sessions:
            page = await sessions.runs.list(perdure.RunQuery(name="nightly", status="completed"))
    assert [each.name for each in page.runs] == ["nightly"]


async def test_the_long_job_of_its_guide_works() -> None:
    guide = definitions("long-jobs.md")

    await guide["test_the_model_sees_how_far_it_has_come"]()
    lines = [call("note", text="one"), call("note", text="two"), "Done."]
    noted = await play(replace(guide["reviewer"], tools=[guide["note"]]), "Go", model=ScriptedModel(lines))
    assert noted.items(guide["NOTES"]) == ("one", "two")


async def test_the_programs_of_the_guide_of_long_jobs_work(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long_jobs_guide.py").write_text("\n".join(blocks("long-jobs.md")))
    environment = {"PYTHONPATH": str(tmp_path)}
    stack = make_stack(apis=0, agents="long_jobs_guide:reviewer", environment=environment)
    for name, value in stack.environment.items():
        if name.startswith("PERDURE_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("PERDURE_AGENTS")
    guide = definitions("long-jobs.md")

    async with asyncio.timeout(2 * PATIENCE):
        verdict = await guide["review"]("perdure")
        assert await guide["review"]("perdure") == verdict
        assert await guide["review_within"](PATIENCE, "perdure") == verdict.problem
        # Else it might have ended before the first look.
        stack.workers[0].kill()
        assert "still at work" in await guide["review_within"](0, "another")
        async with perdure.connect() as sessions:
            assert len((await sessions.list()).sessions) == 2


@pytest.fixture
def guide_stack(make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A worker that serves the agents of the authors' guide, and its environment here, too."""
    code = "\n".join(blocks("authoring.md")).replace("anthropic:claude-sonnet-4-5", "demo")
    (tmp_path / "authors_guide.py").write_text(code)
    agents = "authors_guide:agent,authors_guide:refunds"
    stack = make_stack(apis=0, agents=agents, environment={"PYTHONPATH": str(tmp_path)})
    for name, value in stack.environment.items():
        if name.startswith("PERDURE_"):
            monkeypatch.setenv(name, value)
    # This process is a program without the agents' code.
    monkeypatch.delenv("PERDURE_AGENTS")
    return stack


async def test_the_programs_of_the_authors_guide_work(guide_stack: Stack) -> None:
    guide = definitions("authoring.md")

    async with asyncio.timeout(2 * PATIENCE):
        assert await guide["ask"]("hello") == "You said: hello"

        async with perdure.connect() as sessions:
            for message in ("one", "two"):
                await guide["say"](sessions, "7", message)
            assert len((await sessions.list()).sessions) == 2

            receipt = await sessions.start("refunds", 'use refund {"order": "7", "amount": 50}')
            async for event in sessions.events(receipt.session_id):
                if event.type == "session.waiting":
                    await guide["approve_all"](sessions, receipt.session_id)
                if event.type == "action.result":
                    assert (event.data or {})["result"]["output"] == "Refunded 50.00."
                    break

        stop = asyncio.Event()
        stop.set()
        await guide["look_after"](stop)
