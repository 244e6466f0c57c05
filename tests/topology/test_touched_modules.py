"""How many modules a reader must know to follow one message from HTTP to its answer."""

import asyncio
import contextlib
import inspect
import os
import sqlite3
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

import worker
from api import server
from perdure.settings import Settings
from perdure.store.open import open_store
from tests.support.processes import PATIENCE, free_port
from tests.support.stack import TemporalServer

ROOT = Path(worker.__file__).parent
PRODUCT = tuple(f"{ROOT / name}{os.sep}" for name in ("perdure", "api", "workflows", "activities"))
#: What begins in them is begun by a clock, whether a message comes or not: on a slow machine it falls into the message.
TIMED = tuple(str(ROOT / name) for name in ("perdure/runtime/sweeper.py", "perdure/runtime/remote/callbacks.py"))
#: Fewer is better; more needs a reason.
# The 46th is the client of drivers, apart from what signals them; the next two are the values of deliveries, and the
# cursors of lists, apart from the other values and rows of the store. Six came with queue modes (what waits, and what
# its mode does to it: in the session, the store and the driver), and with the reports of attempts. One came with
# checkpoints: whether a reply takes one.
MOST = 55


class Touched:
    """The product's modules in which a function has run while it was switched on, in any thread.

    The bodies of modules and classes are not counted: they run when the sandbox of a new workflow imports its module.
    """

    def __init__(self) -> None:
        self.on = False
        self._files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            file = frame.f_code.co_filename
            if file not in self._files and not _is_timed(frame):
                self._files.add(file)

    @property
    def modules(self) -> list[str]:
        return sorted(str(Path(file).relative_to(ROOT)) for file in self._files if file.startswith(PRODUCT))


def _is_timed(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in TIMED:
            return True
        frame = frame.f_back
    return False


@contextmanager
def touched() -> Generator[Touched]:
    found = Touched()
    # Before anything starts: a thread that runs already would not be seen.
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def until_waiting(database: str, session_id: str, turns: int) -> None:
    """Wait until the session has ended so many turns, as its rows say: readers of the stream are another matter."""
    path = database.removeprefix("sqlite:///")
    query = "SELECT count(*) FROM sessions WHERE session_id = ? AND turns = ? AND status = 'waiting'"
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                if connection.execute(query, (session_id, turns)).fetchone() == (1,):
                    return
            await asyncio.sleep(0.02)


@pytest.mark.alone
async def test_a_message_touches_few_modules(tmp_path: Path, temporal_server: TemporalServer) -> None:
    port = free_port()
    settings = Settings(
        temporal_address=temporal_server.address,
        task_queue=f"touched-{port}",
        data_dir=tmp_path,
        port=port,
        agents="perdure.agents.demo:agent",
    )
    database = settings.database
    store = await open_store(database)
    await store.migrate()
    await store.close()
    stop, ready = asyncio.Event(), asyncio.Event()
    with touched() as found:
        async with (
            worker.serving(settings),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
        ):
            serving = asyncio.create_task(server.serve(settings, stop, ready))
            await asyncio.wait_for(ready.wait(), PATIENCE)
            created = (await http.post("/eve/v1/session", json={"message": "hello"})).json()
            await until_waiting(database, created["sessionId"], 1)

            found.on = True
            again = {"continuationToken": created["continuationToken"], "message": "hello"}
            assert (await http.post(f"/eve/v1/session/{created['sessionId']}", json=again)).status_code == 200
            await until_waiting(database, created["sessionId"], 2)
            found.on = False

            stop.set()
            await serving

    assert "perdure/harness/model_call.py" in found.modules
    assert len(found.modules) <= MOST, "\n".join(found.modules)
