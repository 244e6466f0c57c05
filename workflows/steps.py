"""The steps of a turn, executed as activities."""

import asyncio
from typing import Any, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from perdure.protocol import names
from perdure.protocol.deliveries import Bounds
from perdure.protocol.requests import (
    Concluded,
    Conclusion,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
)

from . import failures, policies
from .policies import Policy

T = TypeVar("T")
NONE_TYPE: Any = type(None)
#: Workers of older builds return None.
CONCLUDED_TYPE = cast("type[Concluded | None]", Concluded | None)


class ActivitySteps:
    """Implements `Steps`: each method executes one activity on the task queue of its kind."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        return await execute_step(
            names.CALL_MODEL,
            call,
            queue=names.MODELS_QUEUE,
            policy=policies.model(self._bounds) if self._bounds else policies.MODEL,
            summary=f"step {call.at.step}: {label or call.agent}",
            result=cast("type[ModelOutcome]", ModelOutcome),
        )

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        return await execute_step(
            names.CALL_TOOL,
            call,
            queue=names.TOOLS_QUEUE,
            policy=policies.tool(call.call, self._bounds),
            summary=f"step {call.at.step}: {call.call.summary or call.call.tool}",
            result=ToolOutcome,
        )

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        return await execute_step(
            names.RESUME_TURN, resumption, policy=policies.SHORT, summary="resume", result=Resumed
        )

    async def park(self, park: ParkTurn) -> None:
        waiting = f"park: {len(park.open)} open"
        await execute_step(names.PARK_TURN, park, policy=policies.SHORT, summary=waiting, result=type(None))

    async def conclude(self, conclusion: Conclusion) -> Concluded | None:
        summary = f"{conclusion.kind}: {conclusion.failure.code}"
        concluding = asyncio.ensure_future(
            execute_until_done(names.CONCLUDE_TURN, conclusion, summary=summary, result=CONCLUDED_TYPE)
        )
        try:
            try:
                return await asyncio.shield(concluding)
            except asyncio.CancelledError:
                # The end of a turn must be recorded even if the turn is cancelled meanwhile. Older runs cancelled it.
                if not workflow.patched("conclude-to-the-end"):
                    concluding.cancel()
                return await concluding
        except ActivityError as error:
            raise failures.of_activity(error) from error

    def parallel(self, limit: int | None, calls: int) -> int:
        if limit is not None or calls <= policies.PARALLEL:
            return limit or calls
        # Older workers send no limit, and older turns began all calls at once. Those with more calls than Temporal
        # allows to be open were stuck: from here on they begin some calls at a time.
        return policies.PARALLEL if workflow.patched("parallel-calls") else calls

    def should_continue_as_new(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    def cancelled(self, *, early: bool = False) -> bool:
        if workflow.cancellation_reason() is None:
            return False
        # Turns that began before this check existed ran their calls here.
        return not early or workflow.patched("stop-before-calls")


async def execute_until_done(name: str, argument: Any, *, summary: str, result: type[T] = NONE_TYPE) -> T:
    """Execute an activity that must succeed in the end, however long the store is unavailable."""
    return await workflow.execute_activity(
        name,
        argument,
        task_queue=names.sibling(workflow.info().task_queue, names.MODELS_QUEUE),
        result_type=result,
        start_to_close_timeout=policies.UNTIL_DONE.start_to_close,
        heartbeat_timeout=policies.UNTIL_DONE.heartbeat,
        retry_policy=policies.UNTIL_DONE.retry,
        summary=summary,
    )


async def execute_step(
    name: str, argument: Any, *, queue: str = names.MODELS_QUEUE, policy: Policy, summary: str, result: type[T]
) -> T:
    """Execute one activity; raises `StepFailed` when all attempts have failed."""
    try:
        return await workflow.execute_activity(
            name,
            argument,
            task_queue=names.sibling(workflow.info().task_queue, queue),
            result_type=result,
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
        if is_cancelled_exception(error) or workflow.cancellation_reason() is not None or failures.is_cancelled(error):
            raise asyncio.CancelledError from error
        raise failures.of_activity(error) from error
