"""The machine and the versions that a run was made with."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from perdure.dev.temporal_server import binary


def described(store: str) -> dict[str, str]:
    return {
        "store": store,
        "processor": f"{os.cpu_count()} cores, {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "Temporal": _server(),
        **{name: version(name) for name in ("temporalio", "pydantic-ai-slim", "fastapi", "uvicorn", "perdure")},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except FileNotFoundError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _server() -> str:
    said = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=True, timeout=20)
    return said.stdout.strip().removeprefix("temporal version ")
