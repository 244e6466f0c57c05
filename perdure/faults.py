"""Points at which a test can kill this process, to test recovery from a real death.

`PERDURE_KILL_POINT=tool_after_effect` kills at the first pass, `…:3` at the third. With `PERDURE_KILL_ONCE_FILE`
only the process that can create that file is killed, so that the next one survives.
"""

import os
import signal
from collections import Counter
from typing import Literal, TypeAlias

KillPoint: TypeAlias = Literal[
    "model_before_begin",
    "model_after_begin",
    "model_mid_stream",
    "model_before_settle",
    "model_after_settle",
    "tool_before_intent",
    "tool_after_intent",
    "tool_after_effect",
    "tool_before_settle",
    "tool_after_settle",
    "park_before_commit",
    "park_after_commit",
    "compaction_mid_call",
    "compaction_after_record",
    "resume_before_commit",
    "resume_after_commit",
    "program_before_stage",
    "program_before_settle",
    "program_after_settle",
    "run_before_intent",
    "run_after_intent",
    "run_after_effect",
    "run_before_settle",
    "run_after_settle",
    "run_before_end",
    "run_after_end",
]

_passes: Counter[str] = Counter()


def reach(point: KillPoint) -> None:
    """Kill this process if the environment names this point."""
    chosen = os.environ.get("PERDURE_KILL_POINT")
    if chosen is None:
        return
    name, _, number = chosen.partition(":")
    if name != point:
        return
    _passes[point] += 1
    if _passes[point] == int(number or 1) and _first(os.environ.get("PERDURE_KILL_ONCE_FILE")):
        os.kill(os.getpid(), signal.SIGKILL)


def _first(path: str | None) -> bool:
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
