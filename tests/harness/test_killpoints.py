import os
import signal
import subprocess
import sys
from pathlib import Path

POINT = "from perdure.faults import reach; [reach('tool_after_effect') for _ in range(3)]; print('alive')"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", POINT], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_a_kill_point_nothing_happens() -> None:
    assert run().stdout == "alive\n"
    assert run(PERDURE_KILL_POINT="tool_before_intent").stdout == "alive\n"


def test_the_process_dies_at_the_configured_point() -> None:
    assert run(PERDURE_KILL_POINT="tool_after_effect").returncode == -signal.SIGKILL
    assert run(PERDURE_KILL_POINT="tool_after_effect:3").returncode == -signal.SIGKILL
    assert run(PERDURE_KILL_POINT="tool_after_effect:4").stdout == "alive\n"


def test_only_the_first_process_dies(tmp_path: Path) -> None:
    environment = {"PERDURE_KILL_POINT": "tool_after_effect", "PERDURE_KILL_ONCE_FILE": str(tmp_path / "died")}

    assert run(**environment).returncode == -signal.SIGKILL
    assert run(**environment).stdout == "alive\n"
