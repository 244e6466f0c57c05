"""One turn: as a short-lived child of its session's driver, or inline, in the driver itself."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter
from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import Bounds
from perdure.protocol.requests import (
    Concluded,
    Conclusion,
    Failure,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    ProgramOutcome,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
)
from perdure.session.turn import ContinueAsNew, StepFailed, run_turn
from perdure.telemetry import spans

from . import policies, versions
from .outcomes import CONCLUDED_TYPE, execute_until_done, failure_of_activity, found_cancel
from .policies import Policy

T = TypeVar("T")

#: An inline turn that has added so many events to its driver's history continues as a child workflow.
_LONG_TURN = 400

_MODEL_OUTCOME: TypeAdapter[ModelOutcome] = TypeAdapter(ModelOutcome)
_TOOL_OUTCOME = TypeAdapter(ToolOutcome)
_PROGRAM_OUTCOME = TypeAdapter(ProgramOutcome)
_RESUMED = TypeAdapter(Resumed)
_NOTHING: TypeAdapter[None] = TypeAdapter(None)


class ActivitySteps:
    """Implements `Steps`: each method executes one activity."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds
        self._counts = spans.TurnCounts()

    async def run(self, request: TurnRequest) -> TurnResult | ContinueAsNew:
        """Run the turn, in a span."""
        with spans.turn(request, self._counts, workflow.time, workflow.unsafe.is_replaying) as invoked:
            end = await run_turn(request, self)
            if isinstance(end, ContinueAsNew):
                invoked.became("continued")
            else:
                invoked.ended(end)
        return end

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        self._counts.model_calls += 1
        return await self._execute(
            names.CALL_MODEL,
            call,
            policy=policies.model(self._bounds) if self._bounds else policies.MODEL,
            summary=f"step {call.at.step}: {label or call.agent}",
            outcome=_MODEL_OUTCOME,
        )

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        self._counts.tool_calls += 1
        return await self._execute(
            names.CALL_TOOL,
            call,
            queue=names.sibling(workflow.info().task_queue, names.tools_queue(call.call.pool)),
            policy=policies.tool(call.call, self._bounds),
            summary=f"step {call.at.step}: {call.call.summary or call.call.tool}",
            outcome=_TOOL_OUTCOME,
        )

    async def run_program(self, call: ToolCall) -> ProgramOutcome:
        return await self._execute(
            names.RUN_PROGRAM,
            call,
            queue=names.sibling(workflow.info().task_queue, names.TOOLS_QUEUE),
            policy=policies.tool(call.call, self._bounds),
            summary=f"step {call.at.step}: {call.call.tool}",
            outcome=_PROGRAM_OUTCOME,
        )

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        return await self._execute(
            names.RESUME_TURN, resumption, policy=policies.SHORT, summary="resume", outcome=_RESUMED
        )

    async def park(self, park: ParkTurn) -> None:
        waiting = f"park: {len(park.open)} open"
        # A worker of an older build would park without the requests of programs.
        name = names.PARK_PROGRAMS if park.programs else names.PARK_TURN
        await self._execute(name, park, policy=policies.SHORT, summary=waiting, outcome=_NOTHING)

    async def conclude(self, conclusion: Conclusion) -> Concluded | None:
        summary = f"{conclusion.kind}: {conclusion.failure.code}"
        concluding = asyncio.ensure_future(
            execute_until_done(names.CONCLUDE_TURN, conclusion, summary=summary, result=CONCLUDED_TYPE)
        )
        try:
            while True:
                try:
                    return await asyncio.shield(concluding)
                except asyncio.CancelledError:
                    # The end of a turn must be recorded, however often the turn is stopped. Older runs cancelled it.
                    if concluding.done() or not workflow.patched("conclude-to-the-end"):
                        concluding.cancel()
                        return await concluding
        except ActivityError as error:
            raise failure_of_activity(error) from error

    def parallel(self, limit: int | None, calls: int) -> int:
        if limit is not None or calls <= policies.PARALLEL:
            return limit or calls
        # Older workers send no limit, and older turns began all calls at once. Those with more calls than Temporal
        # allows to be open were stuck: from here on they begin some calls at a time.
        return policies.PARALLEL if workflow.patched("parallel-calls") else calls

    def should_continue_as_new(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    def is_stopping(self) -> bool:
        """Whether the turn was asked to stop."""
        return workflow.cancellation_reason() is not None

    def cancelled(self, *, early: bool = False) -> bool:
        if not self.is_stopping():
            return False
        # Turns that began before this check existed ran their calls here.
        return not early or workflow.patched("stop-before-calls")

    def ends_after_children(self) -> bool:
        return workflow.patched("children-end-first")

    def _queue(self) -> str:
        """The task queue of the steps: the turn's own, so that the server can hand them over with a decision.

        Older runs had another one; replay does not compare queues.
        """
        return workflow.info().task_queue

    async def _execute(
        self,
        name: str,
        argument: Any,
        *,
        queue: str | None = None,
        policy: Policy,
        summary: str,
        outcome: TypeAdapter[T],
    ) -> T:
        """Execute one activity; raises `StepFailed` when all attempts have failed."""
        try:
            result: Any = await workflow.execute_activity(
                name,
                argument,
                task_queue=queue or self._queue(),
                start_to_close_timeout=policy.start_to_close,
                schedule_to_close_timeout=policy.schedule_to_close,
                heartbeat_timeout=policy.heartbeat,
                retry_policy=policy.retry,
                # A turn counts as stopped only after its activities have ended.
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=summary[:200],
            )
        except ActivityError as error:
            # An attempt whose worker died is not retried once its turn is cancelled: it ends as a time-out.
            if is_cancelled_exception(error) or self.is_stopping() or found_cancel(error):
                raise asyncio.CancelledError from error
            raise failure_of_activity(error) from error
        if not versions.reads_outcome(result):
            # The activity ran on a newer build. What it did is recorded: the turn waits for a build that reads it.
            failure = Failure(code=UnreadableState.code, message="This build cannot read the outcome of a step.")
            raise StepFailed(failure, held=True)
        # If it has another shape, the workflow task fails until a build takes over that reads it.
        return outcome.validate_python(result)


@workflow.defn(name=names.TURN_WORKFLOW)
class TurnWorkflow:
    """Starts on the newest build and stays on it; its driver may run an older one."""

    @workflow.run
    async def run(self, request: TurnRequest) -> TurnResult:
        end = await ActivitySteps(request.bounds).run(request)
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
        self._running = asyncio.create_task(self.run(request))

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

    def _queue(self) -> str:
        info = workflow.info()
        # A driver stays on its build. Its steps run on the newest one, which has another queue.
        version = info.get_current_deployment_version()
        versioned = version is not None and version.deployment_name != ""
        return names.sibling(info.task_queue, names.MODELS_QUEUE) if versioned else info.task_queue

    def _length(self) -> int:
        return workflow.info().get_current_history_length() - self._began_at
