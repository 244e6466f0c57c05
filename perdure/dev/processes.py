"""Processes that never outlive the one that started them."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_ANY_PROGRAM = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")
# Looked up before any fork: between fork and exec as little as possible may happen.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def leash() -> Callable[[], None]:
    """What a child runs before its program: the kernel kills it when we die, however we die (Linux only)."""
    parent = os.getpid()

    def tie() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # We died before the kernel knew of the leash.
            os._exit(1)

    return tie


def kill_group(pid: int) -> None:
    """Kill whatever is left of the process group that `pid` led, such as the children of a dead worker's tools."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def bare_environment() -> dict[str, str]:
    """What any program needs of our environment. It holds keys, which are not for programs that are not ours."""
    return {name: os.environ[name] for name in _ANY_PROGRAM if name in os.environ}


async def stop(process: asyncio.subprocess.Process, patience: float) -> None:
    """Ask the process to end, insist when it does not, and leave nothing of its group."""
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
    """The command line of one of our own parts, run by this very Python."""
    return [sys.executable, "-m", "perdure", part, *options]


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"
