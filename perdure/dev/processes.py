"""Child processes that end with their parent."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_ANY_PROGRAM = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")
# Loaded before any fork, because little is safe between fork and exec.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` that makes the kernel kill the child when this process ends (Linux only)."""
    parent = os.getpid()

    def set_signal() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent ended before the call above.
            os._exit(1)

    return set_signal


def kill_group(pid: int) -> None:
    """Kill the rest of the process group of `pid`, such as processes that a dead worker's tools started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def bare_environment() -> dict[str, str]:
    """A minimal environment for foreign programs: ours contains keys."""
    return {name: os.environ[name] for name in _ANY_PROGRAM if name in os.environ}


async def stop(process: asyncio.subprocess.Process, patience: float) -> None:
    """Send SIGTERM, wait up to `patience` seconds, then kill the process and its group."""
    try:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
    finally:
        kill_group(process.pid)
    await process.wait()


def command(part: str, *options: str) -> list[str]:
    """The command line of one of our own parts, with this Python interpreter."""
    return [sys.executable, "-m", "perdure", part, *options]


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"
