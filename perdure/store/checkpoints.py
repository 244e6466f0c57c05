"""Checkpoints of sessions: what is kept of a moment, and how a session goes back to it. Frozen values, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure.protocol.wire import JsonObject

from .values import SessionRow

#: The version of snapshots that this build writes.
SNAPSHOT_VERSION = "1"

#: The bytes of a snapshot as JSON.
LARGEST_SNAPSHOT = 1_048_576
#: Checkpoints of one session: the newest without a name, and those with one.
UNNAMED_KEPT = 20
MOST_NAMED = 500
#: Rollbacks of one session that its next turn is told of.
MOST_NOTES = 100
#: The children that a snapshot names.
MOST_CHILDREN = 1_000


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a session."""

    checkpoint_id: str
    session_id: str
    number: int
    turn: int
    step: int
    taken_at: str
    name: str | None = None
    # The step of the plan that was done.
    plan_step: int | None = None
    # The bytes of its snapshot.
    size: int = 0
    # None: not read.
    snapshot: JsonObject | None = None


@dataclass(frozen=True)
class Rollback:
    """The state of a session is to be again as it was at a checkpoint; its turns stay."""

    session_id: str
    checkpoint_id: str
    # Whether slices are taken back that keep a log.
    include_logs: bool = False


class CheckpointStore(Protocol):
    async def list(self, session_id: str, limit: int, before: int | None = None) -> Sequence[Checkpoint]:
        """The checkpoints with numbers before this one, newest first, without their snapshots."""
        ...

    async def find(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        """The checkpoint with its snapshot."""
        ...

    async def snapshot(self, session_id: str) -> JsonObject | None:
        """The state of the session now, in the form of a snapshot; None: there is no such session."""
        ...

    async def roll_back(self, rollback: Rollback) -> SessionRow:
        """Write the slots of a checkpoint again, and leave a note for the next turn; all of it or nothing.

        `SessionBusy` while a turn runs or a delivery waits, `CheckpointNotFound`, or `SessionGone`.
        """
        ...
