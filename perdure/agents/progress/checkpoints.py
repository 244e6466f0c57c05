"""When the state of a session is kept as a checkpoint."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from perdure.agents.progress.slices import Slice
from perdure.errors import InvalidDeclaration
from perdure.protocol.events import NewEvent
from perdure.protocol.names import SLICE_PREFIX

#: What can happen to a plan: any change, a step that becomes done, the last step that becomes done.
PLAN_UPDATED = "plan.updated"
PLAN_STEP_DONE = "plan.step_done"
PLAN_COMPLETED = "plan.completed"

_EVENTS = (PLAN_UPDATED, PLAN_STEP_DONE, PLAN_COMPLETED)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 _.:-]{0,98}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Milestone:
    """The name of a checkpoint that a tool asks for: `ctx.checkpoint(REVIEWED)`, or `ctx.checkpoint("reviewed")`.

    Checkpoints with a name are kept.
    """

    name: str

    def __post_init__(self) -> None:
        if not (isinstance(cast("object", self.name), str) and _NAME.fullmatch(self.name)):
            raise InvalidDeclaration(
                f"A milestone cannot be named {self.name!r}: use 1 to 100 letters, digits, spaces and any of '_.:-'."
            )


@dataclass(frozen=True)
class CheckpointTrigger:
    """What makes a checkpoint; it is taken in the transaction of what triggers it. Any one of these does.

    `events`: of the plan (`plan.updated`, `plan.step_done`, `plan.completed`). `slices`: a write to one of these;
    `tools`: a completed call of one of these; `turns`: every so many turns; `when`: a function of an event that says
    yes, of those of plans, of calls, and of the ends of turns.
    """

    events: Collection[str] = (PLAN_STEP_DONE,)
    slices: "Collection[Slice[Any] | str]" = ()
    tools: Collection[str] = ()
    turns: int | None = None
    when: Callable[[NewEvent], bool] | None = None
    #: The slots of the slices.
    slots: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        for name, value in (("events", self.events), ("slices", self.slices), ("tools", self.tools)):
            if isinstance(cast("object", value), str) or not isinstance(cast("object", value), Iterable):
                raise InvalidDeclaration(f"The {name} of a CheckpointTrigger are a collection: `{name}={{…}}`.")
        if unknown := sorted(str(each) for each in self.events if each not in _EVENTS):
            raise InvalidDeclaration(f"A checkpoint is taken at {', '.join(_EVENTS)}; not at {', '.join(unknown)}.")
        turns = cast("object", self.turns)
        if turns is not None and (not isinstance(turns, int) or isinstance(turns, bool) or turns < 1):
            raise InvalidDeclaration(f"turns is a whole number, at least 1, or None; not {self.turns!r}.")
        when = cast("object", self.when)
        if when is not None and (not callable(when) or inspect.iscoroutinefunction(when)):
            # A coroutine would count as yes, at every event.
            raise InvalidDeclaration("when is a plain function of an event: `when=lambda event: …`.")
        names = [each if isinstance(each, str) else each.name for each in self.slices]
        object.__setattr__(self, "slots", frozenset(f"{SLICE_PREFIX}{each}" for each in names))


#: Triggers of an agent. None: only tools make checkpoints, with `ctx.checkpoint`.
Checkpoints: TypeAlias = CheckpointTrigger | None
