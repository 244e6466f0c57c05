"""Finding and running the shells: the worker and the API.

In a wheel they lie inside the package; in a checkout at its top. The core imports neither: it looks for them.
"""

import asyncio
import importlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

from perdure.settings import Settings

logger = logging.getLogger(__name__)

#: Runs until `stop` is set; sets `ready` once it does its work.
Serve: TypeAlias = Callable[[Settings, asyncio.Event, asyncio.Event], Awaitable[None]]

_SHIPPED = "perdure.shells"
# How often Temporal is asked again, and how often we say so.
_RETRY = 1.0
_REMINDER = 15


def shell(name: str) -> ModuleType:
    """The shell's module of this name: as it was shipped, or from the checkout."""
    shipped = find_spec(_SHIPPED) is not None
    return importlib.import_module(f"{_SHIPPED}.{name}" if shipped else name)


def run(part: Literal["worker", "api"], settings: Settings, ready_file: Path | None = None) -> None:
    """Run one part alone until SIGINT or SIGTERM."""
    if part == "worker":
        asyncio.run(_worker(settings, ready_file))
    else:
        import uvloop

        uvloop.run(_api(settings, ready_file))


async def _worker(settings: Settings, ready_file: Path | None) -> None:
    stop = _stopped_by_signals()
    serve: Serve = shell("worker").run
    if await answered(settings, stop):
        await _serve(serve, settings, stop, ready_file)


async def _api(settings: Settings, ready_file: Path | None) -> None:
    stop = _stopped_by_signals()
    serve: Serve = shell("api.serve").serve
    await _serve(serve, settings, stop, ready_file)


async def _serve(serve: Serve, settings: Settings, stop: asyncio.Event, ready_file: Path | None) -> None:
    if ready_file is not None:
        # Whoever left it there was killed, and may have had our process id: in a container that is always the same.
        ready_file.unlink(missing_ok=True)
    ready = asyncio.Event()
    announcing = asyncio.create_task(_announce(ready, ready_file))
    try:
        await serve(settings, stop, ready)
    finally:
        announcing.cancel()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


async def _announce(ready: asyncio.Event, ready_file: Path | None) -> None:
    """Say that we are ready, for whoever started us: our process id in a file."""
    await ready.wait()
    logger.info("ready")
    if ready_file is not None:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        ready_file.write_text(str(os.getpid()))


async def answered(settings: Settings, stop: asyncio.Event) -> bool:
    """Wait for Temporal to answer, and say whom we wait for; False when stopped before it did."""
    from .connect import connect

    asked = 0
    while not stop.is_set():
        try:
            await connect(settings)
            return True
        except (RuntimeError, OSError) as error:
            if asked % _REMINDER == 0:
                logger.warning("waiting for Temporal at %s: %s", settings.temporal_address, _first_line(error))
        asked += 1
        await _elapsed(stop, _RETRY)
    return False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


async def _elapsed(stop: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(stop.wait())
    await asyncio.wait({waiting}, timeout=seconds)
    waiting.cancel()


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
