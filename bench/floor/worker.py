"""The floor's worker, as lean as a worker can be: `python -m bench.floor.worker REPORTS READY`.

No sandbox, the SDK's own converter, one task queue, uvloop.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.settings import Settings

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
    settings = Settings()
    worker = Worker(
        await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace),
        task_queue=names.QUEUE,
        workflows=[FloorSession, FloorTurn],
        activities=[Reports(reports).act],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        ready.write_text(str(os.getpid()))
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2])))
