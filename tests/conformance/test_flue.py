"""The published client of Flue, unmodified, in Node: one test per scenario in flue/scenarios."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conformance.npm import node_with
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent / "flue"
SCENARIOS = sorted(path.stem for path in (FOLDER / "scenarios").glob("*.mjs"))


@pytest.fixture(scope="module")
def node() -> str:
    return node_with(FOLDER)


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_client_of_flue_gets_through(node: str, stack: Stack, scenario: str) -> None:
    done = subprocess.run(
        [node, f"scenarios/{scenario}.mjs"],
        cwd=FOLDER,
        env={**os.environ, "PERDURE_URL": stack.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
