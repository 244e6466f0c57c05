"""One turn: as a short-lived child of its session's driver, or inline, in the driver itself."""

import asyncio
from collections.abc import Callable

from temporalio import workflow

from perdure.protocol import names
from perdure.protocol.requests import TurnRequest, TurnResult
from perdure.session.turn import ContinueAsNew, run_turn
from perdure.telemetry import spans

from .steps import ActivitySteps

#: An inline turn that has added so many events to its driver's history continues as a child workflow.
_LONG_TURN = 400


@workflow.defn(name=names.TURN_WORKFLOW)
class TurnWorkflow:
    """Starts on the newest build and stays on it; its driver may run an older one."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        with spans.turn(request):
            end = await run_turn(request, ActivitySteps(request.bounds))
        if isinstance(end, ContinueAsNew):
            # A long turn continues as new between two steps. The driver waits for the whole chain of runs.
            workflow.continue_as_new(end.request)
        return end


class InlineTurn(ActivitySteps):
    """A turn in its driver's history: without a workflow of its own, but on the driver's build."""

    def __init__(self, request: TurnRequest, is_ending: Callable[[], bool]) -> None:
        """`is_ending`: whether the session is about to end."""
        super().__init__(request.bounds)
        self._is_ending = is_ending
        self._began_at = workflow.info().get_current_history_length()
        self._is_cancelled = False
        self._running = asyncio.create_task(self._run(request))

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._running.cancel()

    async def end(self) -> TurnResult | ContinueAsNew:
        """Wait for its end. `ContinueAsNew`: the rest of it needs a history of its own."""
        return await self._running

    def is_stopping(self) -> bool:
        return self._is_cancelled or self._is_ending() or super().is_stopping()

    def should_continue_as_new(self) -> bool:
        return super().should_continue_as_new() or self._length() >= _LONG_TURN

    def _length(self) -> int:
        return workflow.info().get_current_history_length() - self._began_at

    async def _run(self, request: TurnRequest) -> TurnResult | ContinueAsNew:
        with spans.turn(request):
            return await run_turn(request, self)
