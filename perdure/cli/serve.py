"""Finds and runs the worker and the API.

In a wheel they are inside the package, in a checkout at its top. The core does not import them; it finds them by name.
"""

import asyncio
import contextlib
import gc
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

#: Runs until `stop` is set; sets `ready` when it is ready.
Serve: TypeAlias = Callable[[Settings, asyncio.Event, asyncio.Event], Awaitable[None]]

Part: TypeAlias = Literal["worker", "api"]

_SHIPPED = "perdure.shells"
_CHECKOUT = Path(__file__).resolve().parents[2]
_TOP = ("worker", "api", "activities", "workflows")
# Seconds between two tries to reach Temporal, and after how many tries the warning is repeated.
_RETRY = 1.0
_REMINDER = 15
#: Seconds to wait for a missing namespace: it is often created while the first processes start.
NAMESPACE_PATIENCE = 30.0
# An API can start without Temporal. It waits so many seconds for a first answer.
_FIRST_ANSWER_SECONDS = 2.0


def shell(name: str) -> ModuleType:
    """The module of this name outside the core: of the wheel or of the checkout."""
    if find_spec(_SHIPPED) is not None:
        return importlib.import_module(f"{_SHIPPED}.{name}")
    # In a checkout our names are common: a module of the working folder may hide one of ours.
    for top in _TOP:
        spec = find_spec(top)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        found = next(filter(None, places), None)
        if found is None or Path(found).resolve() not in (_CHECKOUT / f"{top}.py", _CHECKOUT / top / "__init__.py"):
            raise Misconfigured(
                f"{found} has the name of a module of Perdure's: rename it, start in another folder, or install the "
                "wheel (`make build`), which brings no module but `perdure`."
            )
    return importlib.import_module(name)


def run(part: Part, settings: Settings, ready_file: Path | None = None) -> None:
    """Run the worker or the API until SIGINT or SIGTERM."""
    for sentence in misspelt(os.environ):
        logger.warning("%s", sentence)
    import uvloop

    uvloop.run(_serve(part, settings, ready_file))


def check(settings: Settings) -> None:
    """Load the agents and the runs as a worker does, and check what they declare."""
    asyncio.run(shell("worker").declared(settings))


def _imported(part: Part) -> Serve:
    """What runs this part.

    What is there when a process is ready stays as long as it lives, so the garbage collector does not look through it
    again: in a worker that took a tenth of a second each time, in which everything else waited.
    """
    gc.disable()
    try:
        return shell("worker").run if part == "worker" else shell("api.server").serve
    finally:
        gc.freeze()
        gc.enable()


async def _serve(part: Part, settings: Settings, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serve = _imported(part)
    if settings.temporal_metrics is not None:
        from perdure.runtime.connect import serve_metrics

        serve_metrics(settings.temporal_metrics)
    reach = answered if part == "worker" else ready_or_absent
    if not await reach(settings, stop):
        return
    if ready_file is not None:
        # A killed process leaves its file, and in a container it may have had the same process id.
        ready_file.unlink(missing_ok=True)
    ready = asyncio.Event()
    announcing = asyncio.create_task(_announce(ready, ready_file))
    try:
        await serve(settings, stop, ready)
    finally:
        announcing.cancel()
        # A process that has taken our place may have written it.
        if ready_file is not None and ready_file.exists() and ready_file.read_text() == str(os.getpid()):
            ready_file.unlink(missing_ok=True)


async def _announce(ready: asyncio.Event, ready_file: Path | None) -> None:
    """When ready, log it and write our process id to the ready file."""
    await ready.wait()
    gc.freeze()
    logger.info("ready")
    if ready_file is not None:
        ready_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready_file.write_text(str(os.getpid()))


async def answered(settings: Settings, stop: asyncio.Event, *, patience: float = NAMESPACE_PATIENCE) -> bool:
    """Wait until Temporal answers in our namespace, and log the reason; False when stopped before."""
    from perdure.runtime.connect import ABSENT, namespace_exists, temporal_client

    tries = 0
    while not stop.is_set():
        try:
            client = await temporal_client(settings)
            return await namespace_exists(client) or await _namespace_created(client, settings, stop, patience)
        except ABSENT as error:
            if tries % _REMINDER == 0:
                line = str(error).partition("\n")[0]
                logger.warning("waiting for Temporal at %s: %s", settings.temporal_address, line)
        tries += 1
        await _elapsed(stop, _RETRY)
    return False


async def ready_or_absent(settings: Settings, stop: asyncio.Event, *, patience: float = NAMESPACE_PATIENCE) -> bool:
    """Do not wait for Temporal. If it answers now, wait for our namespace like `answered`."""
    from perdure.runtime.connect import ABSENT, namespace_exists, temporal_client

    try:
        async with asyncio.timeout(_FIRST_ANSWER_SECONDS):
            client = await temporal_client(settings)
            found = await namespace_exists(client)
    except ABSENT:
        return True
    return found or await _namespace_created(client, settings, stop, patience)


async def _namespace_created(client: "Client", settings: Settings, stop: asyncio.Event, patience: float) -> bool:
    """Wait for a missing namespace; `Misconfigured` when it is not created in time."""
    from perdure.runtime.connect import ABSENT, namespace_exists

    missing = f"Temporal at {settings.temporal_address} has no namespace {settings.temporal_namespace!r}"
    logger.warning("%s; waiting up to %g s for it to be created", missing, patience)
    deadline = time.monotonic() + patience
    while not stop.is_set():
        await _elapsed(stop, min(_RETRY, patience))
        # While Temporal is not reachable, it is not known.
        with contextlib.suppress(*ABSENT):
            if await namespace_exists(client):
                return True
            if time.monotonic() > deadline:
                raise Misconfigured(f"{missing}. Create it, or name another one in PERDURE_TEMPORAL_NAMESPACE.")
    return False


async def _elapsed(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
