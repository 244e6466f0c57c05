"""The planning tools, apart from the rest of plans: to read docstrings takes long, and few agents need it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from perdure.agents.context import ToolContext
from perdure.agents.tool import Tool, tool
from perdure.protocol.wire import JsonObject

from .plan import MOST_STEPS, PLAN, Plan, StepStatus, add_steps, set_up, update_step

_Title: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]
_Titles: TypeAlias = Annotated[list[_Title], Field(min_length=1, max_length=MOST_STEPS)]


async def _change(ctx: ToolContext, change: Callable[[Plan | None], Plan]) -> JsonObject:
    await PLAN.update(ctx, change)
    return await shown_plan(ctx)


async def shown_plan(ctx: ToolContext) -> Any:
    """The plan as this call has left it."""
    plan = await PLAN.get(ctx)
    return None if plan is None else plan.shown


@tool(name="planning_setup_plan", effects="pure")
async def _setup_plan(
    ctx: ToolContext, objective: Annotated[str, Field(min_length=1, max_length=2_000)], initial_steps: _Titles
) -> Any:
    """Make the plan: what is to be reached, and the steps to it in their order. Returns the whole plan."""
    return await _change(ctx, lambda before: set_up(before, objective, initial_steps))


@tool(name="planning_add_step", effects="pure")
async def _add_step(ctx: ToolContext, steps: _Titles) -> Any:
    """Add steps at the end of the plan. Returns the whole plan."""
    return await _change(ctx, lambda before: add_steps(before, steps))


@tool(name="planning_update_step", effects="pure")
async def _update_step(
    ctx: ToolContext, step_id: int, title: _Title | None = None, status: StepStatus | None = None
) -> Any:
    """Change the title or the status of a step. Mark a step done as soon as it is. Returns the whole plan."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return await _change(ctx, lambda before: update_step(before, step_id, title, status, now))


@tool(name="planning_read_plan", effects="pure")
async def _read_plan(ctx: ToolContext) -> Any:
    """The whole plan as it is now."""
    return await shown_plan(ctx)


#: The result of these is the plan: when others have changed it at the same time, it is read again.
PLANNING_TOOLS: tuple[Tool[..., Any], ...] = tuple(
    replace(each, late_result=shown_plan) for each in (_setup_plan, _add_step, _update_step, _read_plan)
)
