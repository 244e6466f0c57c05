"""One tool call."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from temporalio import activity

from perdure.errors import WrongPool
from perdure.protocol import names
from perdure.protocol.requests import ProgramOutcome, ToolCall, ToolOutcome

from .attempt import attempted, current_attempt

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


class ToolActivities:
    def __init__(self, harness: Harness, pool: str | None = None) -> None:
        """`pool`: the pool whose calls come here; None: calls of tools without one."""
        self.harness = harness
        self._pool = pool

    @activity.defn(name=names.CALL_TOOL)
    @attempted()
    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        if call.call.pool != self._pool:
            # A turn of a build that knows no pools asks for it here. A newer build will ask for it where it belongs.
            raise WrongPool(f"The tool {call.call.tool!r} runs in the pool {call.call.pool!r}.")
        attempt, cancelled = current_attempt(self.harness.worker), threading.Event()
        try:
            return await self.harness.call_tool(call, attempt, cancelled, activity.is_worker_shutdown)
        except asyncio.CancelledError:
            # For threads of the tool that still run and check it.
            cancelled.set()
            raise

    @activity.defn(name=names.RUN_PROGRAM)
    @attempted()
    async def run_program(self, call: ToolCall) -> ProgramOutcome:
        return await self.harness.run_program(call, current_attempt(self.harness.worker))
