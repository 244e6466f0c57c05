"""Bodies of requests that are no messages: forks, controls, cancels, checkpoints and the settings of lanes."""

from typing import Any, TypeGuard, cast

from perdure.bounds import quoted
from perdure.errors import CheckpointNotFound, Invalid
from perdure.runtime.forks import ForkPlace
from perdure.runtime.inbox import LaneChange

from .bodies import Fields

#: Greater than the number of any turn or step.
_LARGEST_NUMBER = 2**53


def parse_lane_change(fields: Fields) -> LaneChange:
    """What is set for a lane; null: as its agent declares it. What is not there stays as it is."""
    known = ("mode", "cap", "overflow")
    # A misspelled field must not be ignored beside one that is right: its sender would take it for set.
    if unknown := fields.keys() - set(known):
        raise Invalid(f"Expected the fields 'mode', 'cap' and 'overflow' only, not {quoted(min(unknown))!r}.")
    # Each value is checked where it is set, for callers in Python, too.
    return cast("LaneChange", {name: fields[name] for name in known if name in fields})


def checkpoint_id(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(f"Expected '{name}' to be the id of a checkpoint.")
    if not (value.isascii() and value.isprintable()):
        raise CheckpointNotFound
    return value


def parse_fork(fields: Fields) -> ForkPlace:
    """The turn, and the step of it, after which the fork begins; or the checkpoint that was taken there."""
    if unknown := fields.keys() - {"turn", "step", "checkpoint"}:
        raise Invalid(f"Expected the fields 'turn', 'step' and 'checkpoint' only, not {quoted(min(unknown))!r}.")
    if "checkpoint" in fields:
        if len(fields) > 1:
            raise Invalid("Expected either 'checkpoint', or 'turn' with or without 'step'.")
        return ForkPlace(checkpoint=checkpoint_id(fields["checkpoint"], "checkpoint"))
    turn, step = fields.get("turn"), fields.get("step")
    if not _is_number(turn):
        raise Invalid("Expected 'turn' to be the number of a turn, 0 or more.")
    if step is not None and not _is_number(step):
        raise Invalid("Expected 'step' to be the number of a step, 0 or more.")
    return ForkPlace(turn, step)


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_NUMBER


def parse_control(fields: Fields) -> None:
    """Check the body of a compaction, a clear or a reset: it says at most why."""
    if "continuationToken" in fields:
        raise Invalid("Expected no 'continuationToken' field: the session is named by the path.")
    reason = fields.get("reason")
    if reason is not None and not (isinstance(reason, str) and reason):
        raise Invalid("Expected 'reason' to be a non-empty string.")


def parse_cancel(fields: Fields) -> str | None:
    """The turn to stop; None means the current one."""
    turn_id = fields.get("turnId")
    if turn_id is not None and not (isinstance(turn_id, str) and turn_id):
        raise Invalid("Expected 'turnId' to be a non-empty string.")
    return turn_id
