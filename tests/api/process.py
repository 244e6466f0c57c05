"""The API of the tests as a process of its own: what one caller does to the others is measured from outside."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import httpx2
import uvloop

from perdure.store.base import Store
from perdure.store.open import open_store
from tests.api.served import serving
from tests.support.processes import Process, clean_environment, wait_until


@dataclass
class Watched:
    """How many seconds health took, each time that it was asked."""

    taken: list[float] = field(default_factory=list[float])

    @property
    def longest(self) -> float:
        return max(self.taken)


@dataclass
class ApiProcess:
    """An API in a process, and the store that it serves from."""

    process: Process
    host: str
    port: int
    http: httpx2.AsyncClient
    store: Store

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def memory(self) -> int:
        """The bytes that it holds in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def health(self) -> float:
        """How many seconds health takes, over a connection of its own."""
        began = time.perf_counter()
        connection = HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/eve/v1/health")
            assert connection.getresponse().status == 200
        return time.perf_counter() - began

    @contextmanager
    def watched(self) -> Generator["Watched"]:
        """How long health takes meanwhile, asked again and again by another caller.

        The time in which one of the two was ready to run and got no processor is left out: that is the machine, which
        does other things besides.
        """
        watched = Watched()
        ended = threading.Event()

        def ask() -> None:
            both = (self.process.pid, threading.get_native_id())
            while not (watched.taken and ended.is_set()):
                before = sum(map(_waited, both))
                took = self.health()
                watched.taken.append(took - (sum(map(_waited, both)) - before))
                time.sleep(0.01)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield watched
        finally:
            ended.set()
            asking.join()


def _waited(thread: int) -> float:
    """How many seconds a thread has waited for a processor."""
    return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9


@asynccontextmanager
async def api_process(
    directory: Path, *, descriptors: int | None = None, database: str | None = None
) -> AsyncGenerator[ApiProcess]:
    """The API of `served`, on uvloop as in production; with `descriptors`, that is how many it may open."""
    flag = directory / "url"
    database = database or f"sqlite:///{directory / 'test.db'}"
    program = [sys.executable, "-m", "tests.api.process", str(directory), str(flag), database]
    if descriptors is not None:
        program = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *program]
    process = Process("api", program, directory / "api.log", clean_environment())
    try:
        wait_until(lambda: not process.alive or flag.exists(), "the API to be ready")
        assert process.alive, process.output
        host, port = flag.read_text().removeprefix("http://").split(":")
        store = await open_store(database)
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=60, verify=False) as http:
            yield ApiProcess(process, host, int(port), http, store)
        await store.close()
    finally:
        process.close()


async def _serve(directory: Path, flag: Path, database: str) -> None:
    async with serving(directory, database=database) as api:
        draft = flag.with_suffix(".draft")
        draft.write_text(api.url)
        draft.replace(flag)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
