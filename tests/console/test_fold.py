"""The reducer of the console, in Node: its facts are in `fold.test.mjs`."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_the_reducer_of_the_console_folds_events_as_its_tests_say() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("THE REDUCER IS NOT TESTED: there is no Node")

    ended = subprocess.run(
        [node, "--test", str(HERE / "fold.test.mjs")], capture_output=True, text=True, check=False, timeout=120
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
