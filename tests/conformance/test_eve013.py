"""The official eve client 0.13.8, unmodified, in Node: one test per scenario in eve013/scenarios."""

import fcntl
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent / "eve013"
SCENARIOS = sorted(path.stem for path in (FOLDER / "scenarios").glob("*.mjs"))
NODE = 20


@pytest.fixture(scope="module")
def node() -> str:
    """Node with the client installed; without Node or its package there is nothing to test with."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip(f"CONFORMANCE NOT TESTED: Node {NODE} or newer and npm are needed, and not found")
    version = _output(found, "--version").strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE:
        pytest.skip(f"CONFORMANCE NOT TESTED: Node {NODE} or newer is needed, this is {version}")
    # Another process of the tests may be installing it in the same folder.
    with (FOLDER / "package-lock.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        problem = None if _installed() else _install()
    if problem is not None:
        pytest.skip(f"CONFORMANCE NOT TESTED: npm cannot install the client here:\n{problem[-2000:]}")
    return found


def _install() -> str | None:
    """Install the client; what went wrong, if something did."""
    command = ["npm", "ci", "--ignore-scripts"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=250)
    return done.stderr if done.returncode else None


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    agents = [f"tests.conformance.agents:{name}" for name in ("concierge", "clerk", "foreman")]
    return module_stack(provider=True, agents=",".join(agents))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_client_gets_through(node: str, stack: Stack, scenario: str) -> None:
    run(node, stack, f"scenarios/{scenario}.mjs")


def test_the_guards_of_the_client_recognise_all_events(node: str, stack: Stack) -> None:
    run(node, stack, "guards.mjs")


def test_the_lock_names_no_registry() -> None:
    lock = (FOLDER / "package-lock.json").read_text()

    assert "resolved" not in lock
    assert not re.search(r"registry", lock)


def run(node: str, stack: Stack, script: str) -> None:
    done = subprocess.run(
        [node, script],
        cwd=FOLDER,
        env={**os.environ, "EVE_URL": stack.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _installed() -> bool:
    package = FOLDER / "node_modules" / "eve" / "package.json"
    wanted = json.loads((FOLDER / "package.json").read_text())["devDependencies"]["eve"]
    return package.exists() and json.loads(package.read_text())["version"] == wanted


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
