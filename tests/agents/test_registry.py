import sys
from pathlib import Path

import pytest

from perdure import Agent, AgentRegistry, InvalidDeclaration, load_agents
from perdure.agents.registry import load_runs
from perdure.errors import AgentNotFound


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop_of_tests.py").write_text(
        "from perdure import Agent, run\n"
        "one = Agent('one')\n"
        "more = [Agent('two', model='openai:x'), Agent('three')]\n"
        "nothing = 3\n"
        "empty = []\n"
        "@run(name='nightly')\n"
        "async def nightly(ctx, input): ...\n"
    )
    (tmp_path / "broken_of_tests.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_the_first_agent_is_the_default(project: Path) -> None:
    agents = load_agents("shop_of_tests:one, shop_of_tests:more")

    assert agents.names == ("one", "two", "three")
    assert agents.default.name == "one"


def test_a_default_model_is_for_those_that_name_none(project: Path) -> None:
    agents = load_agents("shop_of_tests:more", "anthropic:y")

    assert [agent.model for agent in agents] == ["openai:x", "anthropic:y"]


def test_how_turns_run_is_for_those_that_do_not_say_it(project: Path) -> None:
    (project / "modes_of_tests.py").write_text(
        "from perdure import Agent\nagents = [Agent('one', turns='child'), Agent('two')]\n"
    )

    agents = load_agents("modes_of_tests:agents", turns="inline")

    assert [agent.turns for agent in agents] == ["child", "inline"]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("shop_of_tests", "does not name an agent; write `module:attribute`, `shop_of_tests:agent` for one"),
        ("./shops/of_tests.py", "write `module:attribute`, `shops.of_tests:agent` for one"),
        ("no_such_shop:one", "no module 'no_such_shop' .*, neither in /.* nor installed; start in the folder"),
        ("shop_of_tests.py:one", "names a file; write the module's name, `shop_of_tests:one`"),
        ("./shops/of_tests.py:one", "write the module's name, `shops.of_tests:one`"),
        ("shop_of_tests:four", "has no 'four' .*; it has 'one'"),
        ("shop_of_tests:nothing", "is not an Agent or a list of Agents, but of type int; the module has 'one'"),
        ("shop_of_tests:empty", "but an empty list"),
        ("shop_of_tests:nightly", "but a run: name it in PERDURE_RUNS, or in a list with an agent"),
        ("", "no agent to serve"),
        ("shop_of_tests:one,shop_of_tests:one", "Two agents"),
    ],
)
def test_a_wrong_reference_is_explained(project: Path, spec: str, complaint: str) -> None:
    with pytest.raises(InvalidDeclaration, match=complaint):
        load_agents(spec)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("shop_of_tests", "does not name a run; write `module:attribute`, `shop_of_tests:run` for one"),
        ("shop_of_tests:four", "has no 'four' .*; it has 'nightly'"),
        ("shop_of_tests:nothing", "is not a Run or a list of Runs, but of type int; the module has 'nightly'"),
        ("shop_of_tests:one", "is not a Run or a list of Runs, but of type Agent; the module has 'nightly'"),
        ("shop_of_tests:empty", "but an empty list"),
    ],
)
def test_a_wrong_reference_to_a_run_is_explained(project: Path, spec: str, complaint: str) -> None:
    with pytest.raises(InvalidDeclaration, match=complaint):
        load_runs(spec)


def test_a_broken_import_inside_the_module_shows_itself(project: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_agents("broken_of_tests:agent")


def test_two_agents_may_not_share_a_name() -> None:
    with pytest.raises(InvalidDeclaration, match="Two agents"):
        AgentRegistry([Agent("a"), Agent("a")])


def test_an_unknown_agent_is_not_found() -> None:
    with pytest.raises(AgentNotFound, match="'b'"):
        AgentRegistry([Agent("a")])["b"]
