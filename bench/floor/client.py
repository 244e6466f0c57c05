"""The floor's client: signals a session, and gets the activity's report as a datagram."""

import asyncio
import socket
import uuid
from pathlib import Path
from time import perf_counter

from temporalio.client import Client, WorkflowHandle

from perdure.agents.agent import Turns

from . import names


class FloorClient:
    """Starts floor sessions and takes turns with them."""

    def __init__(self, client: Client, reports: Path) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(reports))
        asyncio.get_running_loop().add_reader(self._socket, self._on_datagram)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    async def session(self, turns: Turns) -> "FloorSessionClient":
        handle = await self._client.start_workflow(
            names.SESSION, turns, id=f"floor-{uuid.uuid4().hex}", task_queue=names.QUEUE
        )
        return FloorSessionClient(self, handle)

    async def once(self) -> float:
        """Seconds from before the start of a workflow until its one activity has run."""
        delivery = f"floor-{uuid.uuid4().hex}"
        begun = perf_counter()
        reported = asyncio.ensure_future(self.report(delivery))
        await asyncio.sleep(0)
        await self._client.start_workflow(names.TURN, delivery, id=delivery, task_queue=names.QUEUE)
        await reported
        return perf_counter() - begun

    async def report(self, delivery: str) -> None:
        """Wait for the activity of this delivery."""
        reported = self._waiting[delivery] = asyncio.get_running_loop().create_future()
        await reported

    def _on_datagram(self) -> None:
        delivery = self._socket.recv(256).decode()
        waiting = self._waiting.pop(delivery, None)
        if waiting is not None:
            waiting.set_result(None)


class FloorSessionClient:
    """One floor session; `turn` returns when its activity has run."""

    def __init__(self, floor: FloorClient, handle: WorkflowHandle[object, object]) -> None:
        self._floor = floor
        self._handle = handle
        self._turn = 0

    async def turn(self) -> None:
        delivery = f"{self._handle.id}/{self._turn}"
        self._turn += 1
        reported = asyncio.ensure_future(self._floor.report(delivery))
        # The report must be awaited before it can come.
        await asyncio.sleep(0)
        await self._handle.signal(names.DELIVER, delivery)
        await reported

    async def close(self) -> None:
        await self._handle.terminate()
