"""What the console computes, in Node: the facts are in `fold.test.mjs` and `shown.test.mjs`."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("facts", ["fold", "shown"])
def test_the_console_computes_what_its_tests_in_node_say(facts: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("THE REDUCER OF THE CONSOLE IS NOT TESTED: there is no Node")

    ended = subprocess.run(
        [node, "--test", str(HERE / f"{facts}.test.mjs")], capture_output=True, text=True, check=False, timeout=120
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
