"""Packages for Node, as they are published, installed beside the tests that run them."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = 20


def node_with(folder: Path) -> str:
    """Node, with what the folder's `package.json` names; without Node or the packages there is nothing to test with."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip(f"CONFORMANCE NOT TESTED: Node {NODE} or newer and npm are needed, and not found")
    version = _output(found, "--version").strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE:
        pytest.skip(f"CONFORMANCE NOT TESTED: Node {NODE} or newer is needed, this is {version}")
    # Another process of the tests may be installing in the same folder.
    with (folder / "package-lock.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        problem = None if _installed(folder) else _install(folder)
    if problem is not None:
        pytest.skip(f"CONFORMANCE NOT TESTED: npm cannot install {folder.name} here:\n{problem[-2000:]}")
    return found


def run(node: str, folder: Path, script: str, **environment: str) -> None:
    """Run a script of the folder to its end, which must be a good one."""
    done = subprocess.run(
        [node, script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _install(folder: Path) -> str | None:
    """Install the packages; what went wrong, if something did."""
    command = ["npm", "ci", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    return done.stderr if done.returncode else None


def _installed(folder: Path) -> bool:
    wanted: dict[str, str] = json.loads((folder / "package.json").read_text())["devDependencies"]
    return all(_version(folder / "node_modules" / name / "package.json") == each for name, each in wanted.items())


def _version(package: Path) -> str | None:
    return json.loads(package.read_text())["version"] if package.exists() else None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
