"""One tool call."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import ToolCall, ToolOutcome

from .attempt import attempt, current

if TYPE_CHECKING:
    from perdure.harness.tools.call import ToolCaller


class ToolActivities:
    def __init__(self, step: ToolCaller) -> None:
        self._step = step

    @activity.defn(name=names.CALL_TOOL)
    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        cancelled = threading.Event()
        async with attempt():
            try:
                return await self._step.run(call, current(), cancelled, activity.is_worker_shutdown)
            except asyncio.CancelledError:
                # For whatever the tool has left running and still listens.
                cancelled.set()
                raise
