"""The official eve client 0.13.8, unmodified, in Node: one test per scenario in eve013/scenarios."""

import re
from pathlib import Path

import pytest

from tests.conformance.npm import node_with, run
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent / "eve013"
SCENARIOS = sorted(path.stem for path in (FOLDER / "scenarios").glob("*.mjs"))


@pytest.fixture(scope="module")
def node() -> str:
    return node_with(FOLDER)


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    agents = [f"tests.conformance.agents:{name}" for name in ("concierge", "clerk", "foreman")]
    return module_stack(provider=True, agents=",".join(agents))


#: Everything that readers need not see.
HIDDEN = "message.appended,reasoning.appended,action.input.appended,reasoning.completed"
#: Scenarios about pieces: there are none then.
ABOUT_PIECES = ("deltas", "reasoning", "store")


@pytest.fixture(scope="module")
def hiding_stack(module_stack: StackFactory) -> Stack:
    """With an API that hides all that it may."""
    agents = [f"tests.conformance.agents:{name}" for name in ("concierge", "clerk", "foreman")]
    return module_stack(provider=True, agents=",".join(agents), environment={"PERDURE_STREAM_EXCLUDE": HIDDEN})


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each not in ABOUT_PIECES])
def test_the_client_gets_through_without_pieces(node: str, hiding_stack: Stack, scenario: str) -> None:
    run(node, FOLDER, f"scenarios/{scenario}.mjs", EVE_URL=hiding_stack.url)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_client_gets_through(node: str, stack: Stack, scenario: str) -> None:
    run(node, FOLDER, f"scenarios/{scenario}.mjs", EVE_URL=stack.url)


def test_the_guards_of_the_client_recognise_all_events(node: str, stack: Stack) -> None:
    run(node, FOLDER, "guards.mjs", EVE_URL=stack.url)


@pytest.mark.parametrize("folder", sorted(file.parent.name for file in FOLDER.parent.glob("*/package-lock.json")))
def test_the_lock_names_no_registry(folder: str) -> None:
    lock = (FOLDER.parent / folder / "package-lock.json").read_text()

    assert "resolved" not in lock
    assert not re.search(r"registry", lock)
