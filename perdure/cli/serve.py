"""Finding and running the shells: the worker and the API.

In a wheel they lie inside the package; in a checkout at its top. The core imports neither: it looks for them.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias

from perdure.errors import Misconfigured
from perdure.settings import Settings, misspelt

if TYPE_CHECKING:
    from temporalio.client import Client

logger = logging.getLogger(__name__)

#: Runs until `stop` is set; sets `ready` once it does its work.
Serve: TypeAlias = Callable[[Settings, asyncio.Event, asyncio.Event], Awaitable[None]]

_SHIPPED = "perdure.shells"
_CHECKOUT = Path(__file__).resolve().parents[2]
_TOP = ("worker", "api", "activities", "workflows")
# How often Temporal is asked again, and how often we say so.
_RETRY = 1.0
_REMINDER = 15
#: A namespace is often created beside the first processes that use it.
NAMESPACE_PATIENCE = 30.0
# An API starts without Temporal; this is how long it waits for a first answer.
_GLANCE = 2.0


def shell(name: str) -> ModuleType:
    """The shell's module of this name: as it was shipped, or from the checkout."""
    if find_spec(_SHIPPED) is not None:
        return importlib.import_module(f"{_SHIPPED}.{name}")
    for top in _TOP:
        _refuse_hidden(top)
    return importlib.import_module(name)


def _refuse_hidden(top: str) -> None:
    """In a checkout the shells have common names, and modules of the folder that we were started in come first."""
    spec = find_spec(top)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    found = next(filter(None, places), None)
    if found is None or Path(found).resolve() not in (_CHECKOUT / f"{top}.py", _CHECKOUT / top / "__init__.py"):
        raise Misconfigured(
            f"{found} has the name of a module of Perdure's: rename it, start in another folder, or install the "
            "wheel (`make build`), which brings no module but `perdure`."
        )


def run(part: Literal["worker", "api"], settings: Settings, ready_file: Path | None = None) -> None:
    """Run one part alone until SIGINT or SIGTERM."""
    for sentence in misspelt(os.environ):
        logger.warning("%s", sentence)
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
    serve: Serve = shell("api.server").serve
    if await ready_or_absent(settings, stop):
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
        ready_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready_file.write_text(str(os.getpid()))


async def answered(settings: Settings, stop: asyncio.Event, *, patience: float = NAMESPACE_PATIENCE) -> bool:
    """Wait for Temporal to answer in our namespace, and say what we wait for; False when stopped before it did."""
    from perdure.runtime.connect import ABSENT, connect, namespace_exists

    asked = 0
    while not stop.is_set():
        try:
            client = await connect(settings)
            return await namespace_exists(client) or await _namespace_created(client, settings, stop, patience)
        except ABSENT as error:
            if asked % _REMINDER == 0:
                logger.warning("waiting for Temporal at %s: %s", settings.temporal_address, _first_line(error))
        asked += 1
        await _elapsed(stop, _RETRY)
    return False


async def ready_or_absent(settings: Settings, stop: asyncio.Event, *, patience: float = NAMESPACE_PATIENCE) -> bool:
    """Do not wait for Temporal; but when it answers now, wait for our namespace as `answered` does."""
    from perdure.runtime.connect import ABSENT, connect, namespace_exists

    try:
        async with asyncio.timeout(_GLANCE):
            client = await connect(settings)
            found = await namespace_exists(client)
    except ABSENT:
        return True
    return found or await _namespace_created(client, settings, stop, patience)


async def _namespace_created(client: "Client", settings: Settings, stop: asyncio.Event, patience: float) -> bool:
    """Wait for a namespace that is missing; `Misconfigured` when nobody creates it in time."""
    from perdure.runtime.connect import ABSENT, namespace_exists

    missing = f"Temporal at {settings.temporal_address} has no namespace {settings.temporal_namespace!r}"
    logger.warning("%s; waiting up to %g s for it to be created", missing, patience)
    deadline = time.monotonic() + patience
    while not stop.is_set():
        await _elapsed(stop, min(_RETRY, patience))
        # While Temporal is away, nobody can say.
        with contextlib.suppress(*ABSENT):
            if await namespace_exists(client):
                return True
            if time.monotonic() > deadline:
                raise Misconfigured(f"{missing}. Create it, or name another one in PERDURE_TEMPORAL_NAMESPACE.")
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
