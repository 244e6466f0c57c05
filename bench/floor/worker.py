"""The floor's worker, with the options of the product's: `python -m bench.floor.worker REPORTS READY`."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from temporalio import activity

from perdure.protocol import names as queues
from perdure.runtime.connect import temporal_client
from perdure.settings import Settings
from worker import activity_worker, workflow_worker

from . import names
from .workflows import FloorSession, FloorTurn


class Reports:
    """Reports to the client that an activity has run: one datagram on a unix socket, the fastest way there is."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @activity.defn(name=names.ACT)
    async def act(self, delivery: str) -> None:
        self._socket.sendto(delivery.encode(), self._path)


async def main(reports: str, ready: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    settings = Settings(task_queue=names.PREFIX, deployment=None, build_id=None)
    client = await temporal_client(settings)
    async with contextlib.AsyncExitStack() as stack:
        for each in (
            workflow_worker(client, settings, queues.SESSIONS_QUEUE, [FloorSession]),
            workflow_worker(client, settings, queues.TURNS_QUEUE, [FloorTurn]),
            activity_worker(client, settings, queues.MODELS_QUEUE, [Reports(reports).act]),
        ):
            await stack.enter_async_context(each)
        ready.write_text(str(os.getpid()))
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
