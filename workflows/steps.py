"""The work of a turn, done by activities."""

from typing import Any, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from perdure.protocol import names
from perdure.protocol.requests import Conclusion, ModelCall, ModelOutcome, ToolCall, ToolOutcome
from perdure.session.turn import StepFailed

from . import failures, policies
from .policies import Policy

T = TypeVar("T")


class ActivitySteps:
    """Each call is one activity on the queue of its kind."""

    async def call_model(self, call: ModelCall) -> ModelOutcome:
        return await _act(
            names.CALL_MODEL,
            call,
            queue=names.MODELS_QUEUE,
            policy=policies.MODEL,
            summary=f"step {call.at.step}: {call.agent}",
            result=cast("type[ModelOutcome]", ModelOutcome),
        )

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        return await _act(
            names.CALL_TOOL,
            call,
            queue=names.TOOLS_QUEUE,
            policy=policies.tool(call.call),
            summary=f"step {call.at.step}: {call.call.summary or call.call.tool}",
            result=ToolOutcome,
        )

    async def conclude(self, conclusion: Conclusion) -> None:
        await conclude(conclusion)

    def out_of_breath(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()


async def conclude(conclusion: Conclusion) -> None:
    """Tell the readers of a failure that no step could tell."""
    await workflow.execute_activity(
        names.CONCLUDE_TURN,
        conclusion,
        task_queue=names.sibling(workflow.info().task_queue, names.MODELS_QUEUE),
        start_to_close_timeout=policies.LAST_WORD.start_to_close,
        retry_policy=policies.LAST_WORD.retry,
        summary=f"failed: {conclusion.failure.code}",
    )


async def _act(name: str, argument: Any, *, queue: str, policy: Policy, summary: str, result: type[T]) -> T:
    try:
        return await workflow.execute_activity(
            name,
            argument,
            task_queue=names.sibling(workflow.info().task_queue, queue),
            result_type=result,
            start_to_close_timeout=policy.start_to_close,
            heartbeat_timeout=policy.heartbeat,
            retry_policy=policy.retry,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=summary[:200],
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        raise StepFailed(failures.of_activity(error)) from error
