"""What an agent knows of its own progress: plans, slices of state, checkpoints, and prompts that show them."""

from collections.abc import Mapping

from .checkpoints import CheckpointTrigger
from .plan import Planning
from .prompt import Prompt


def wrong_declaration(fields: Mapping[str, object]) -> str | None:
    """A field of an agent that is about its progress and has the wrong type."""
    if not isinstance(fields["planning"], Planning | None):
        return "planning is `Planning(…)`: `planning=Planning(strategy='react')`"
    if not isinstance(fields["checkpoints"], CheckpointTrigger | None):
        return "checkpoints is `CheckpointTrigger(…)` or None: `checkpoints=CheckpointTrigger(turns=10)`"
    return None


def is_prompt(instructions: object) -> bool:
    return isinstance(instructions, Prompt)
