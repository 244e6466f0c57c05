"""The plan of a session: what the model has set out to do, and how far it has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from pydantic import ConfigDict, SerializerFunctionWrapHandler, computed_field, model_serializer, model_validator

from perdure.agents.state import Slot
from perdure.errors import InvalidDeclaration
from perdure.protocol.names import PLAN_SLOT
from perdure.protocol.wire import JsonObject, Wire

StepStatus: TypeAlias = Literal["pending", "in_progress", "done", "blocked"]
Strategy: TypeAlias = Literal["react", "plan_act_reflect", "goal_decompose_route_synthesise"]

#: The steps of one plan.
MOST_STEPS = 200


class PlanRefused(Exception):
    """A change of the plan that makes no sense; the text is shown to the model."""


class PlanStep(Wire):
    """One step of a plan; steps are numbered from 1."""

    model_config = ConfigDict(extra="allow")

    step_id: int
    title: str
    status: StepStatus = "pending"
    done_at: str | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, serialized: SerializerFunctionWrapHandler) -> JsonObject:
        return {name: value for name, value in serialized(self).items() if value is not None}


class Plan(Wire):
    """What the model wants to reach, and the steps to it."""

    # What only a newer build says of a plan stays when this one changes it.
    model_config = ConfigDict(extra="allow")

    objective: str
    steps: tuple[PlanStep, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_status(cls, stored: Any) -> Any:
        # It is computed, and must not become one of the fields that are only kept.
        if not isinstance(stored, dict):
            return stored
        return {name: value for name, value in cast("JsonObject", stored).items() if name != "status"}

    @computed_field
    @property
    def status(self) -> Literal["active", "completed"]:
        """A plan is completed when each of its steps is done."""
        return "completed" if self.steps and all(each.status == "done" for each in self.steps) else "active"

    @property
    def done(self) -> tuple[PlanStep, ...]:
        """The steps that are done."""
        return tuple(each for each in self.steps if each.status == "done")

    @property
    def remaining(self) -> tuple[PlanStep, ...]:
        """The steps that are not done."""
        return tuple(each for each in self.steps if each.status != "done")

    @property
    def shown(self) -> JsonObject:
        """The plan as JSON, for the model and for readers."""
        return self.model_dump(mode="json")

    def changed_since(self, before: "Plan | None") -> list[int]:
        """The ids of the steps that are not as they were."""
        known = set(before.steps) if before else set[PlanStep]()
        return [each.step_id for each in self.steps if each not in known]

    def done_since(self, before: "Plan | None") -> list[int]:
        """The ids of the steps that are done, and were not."""
        known = {each.step_id for each in before.done} if before and before.objective == self.objective else set[int]()
        return [each.step_id for each in self.done if each.step_id not in known]


#: The plan of a session. None: the model has made none.
PLAN: Slot["Plan | None"] = Slot(PLAN_SLOT, Plan | None, default=lambda: None)


# --- changes, without I/O -----------------------------------------------------------------------------------


def set_up(before: Plan | None, objective: str, titles: Sequence[str]) -> Plan:
    if before is not None and before.status == "active":
        raise PlanRefused("There is a plan that is not completed. Change it with planning_add_step, and finish it.")
    return _with_steps(Plan(objective=objective), titles)


def add_steps(before: Plan | None, titles: Sequence[str]) -> Plan:
    return _with_steps(_active(before), titles)


def update_step(before: Plan | None, step_id: int, title: str | None, status: StepStatus | None, now: str) -> Plan:
    plan = _active(before)
    if title is None and status is None:
        raise PlanRefused("Nothing to update: give a title, a status or both.")
    known = {each.step_id: each for each in plan.steps}
    if step_id not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise PlanRefused(f"The plan has no step {step_id}; its steps are: {listed}.")
    step = known[step_id]
    if title is not None:
        step = step.model_copy(update={"title": title})
    if status is not None and status != step.status:
        step = step.model_copy(update={"status": status, "done_at": now if status == "done" else None})
    steps = tuple(step if each.step_id == step_id else each for each in plan.steps)
    return plan.model_copy(update={"steps": steps})


def _active(plan: Plan | None) -> Plan:
    if plan is None:
        raise PlanRefused("There is no plan yet: make one with planning_setup_plan.")
    if plan.status == "completed":
        raise PlanRefused("The plan is completed and cannot be changed; make a new one with planning_setup_plan.")
    return plan


def _with_steps(plan: Plan, titles: Sequence[str]) -> Plan:
    if not titles:
        raise PlanRefused("Give at least one step.")
    if len(plan.steps) + len(titles) > MOST_STEPS:
        raise PlanRefused(f"A plan has at most {MOST_STEPS} steps; this one would have more.")
    new = (PlanStep(step_id=number, title=title) for number, title in enumerate(titles, len(plan.steps) + 1))
    return plan.model_copy(update={"steps": (*plan.steps, *new)})


_GUIDANCE = (
    "For anything that takes several steps, first make a plan with planning_setup_plan. Keep its steps small enough "
    "that each ends in something you can name. Mark a step done with planning_update_step as soon as it is, before you "
    "begin the next one: your progress is saved then, and work goes on from there whatever happens. Add steps when you "
    "find that something is missing, and mark a step blocked when it cannot go on."
)
_STRATEGIES: dict[Strategy, str] = {
    "react": "Decide on the next action from what the last one has shown, and adapt the plan when it has shown more.",
    "plan_act_reflect": (
        "Work in rounds: choose a step of the plan, carry it out, then look at the result. Ask whether the step has "
        "done what it was for and whether the rest of the plan is still right, and correct the plan before you go on."
    ),
    "goal_decompose_route_synthesise": (
        "Break the goal down into parts that can be answered on their own. Decide for each part which tool or agent is "
        "best at it, and hand it over. When all parts are done, put their results together into one answer."
    ),
}


@dataclass(frozen=True)
class Planning:
    """That an agent plans: the model gets tools for a plan, and instructions how to use them."""

    strategy: Strategy = "plan_act_reflect"
    #: What the instructions say about planning.
    guidance: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise InvalidDeclaration(f"The strategy is one of {', '.join(_STRATEGIES)}; not {self.strategy!r}.")
        object.__setattr__(self, "guidance", f"{_GUIDANCE}\n\n{_STRATEGIES[self.strategy]}")
