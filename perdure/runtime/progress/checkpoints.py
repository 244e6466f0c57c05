"""The plan, the state, the checkpoints and the tags of sessions. Nothing here needs Temporal."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from perdure.errors import CheckpointNotFound, Invalid, NoActiveSession, SessionGone, SessionNotFound
from perdure.protocol import names
from perdure.protocol.deliveries import Principal
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import checked_tags
from perdure.store.base import Store
from perdure.store.checkpoints import Checkpoint, Rollback
from perdure.store.values import SessionRow

#: The session, if the caller owns it; None as principal: an operator, or code that may see all.
Get: TypeAlias = Callable[[str, Principal | None], Awaitable[SessionRow]]


@dataclass(frozen=True)
class CheckpointPage:
    """Checkpoints without their snapshots, newest first."""

    checkpoints: Sequence[Checkpoint]
    next_cursor: str | None = None


class Checkpoints:
    def __init__(self, store: Store, get: Get) -> None:
        self._store = store
        self._get = get

    async def plan(self, session_id: str, *, principal: Principal | None = None) -> JsonObject | None:
        """The plan that the model has made; None without one."""
        row = await self._get(session_id, principal)
        slot = (await self._store.slots(row.session_id, [names.PLAN_SLOT])).get(names.PLAN_SLOT)
        if slot is None or slot.value is None:
            return None
        # As it is stored: it may have fields of a newer build.
        return slot.value["value"] if "value" in slot.value else slot.value.get("data")

    async def snapshot(self, session_id: str, *, principal: Principal | None = None) -> JsonObject:
        """The state of the session now, in the form of a checkpoint's snapshot. Nothing of it is kept."""
        row = await self._get(session_id, principal)
        snapshot = await self._store.checkpoints.snapshot(row.session_id)
        if snapshot is None:
            raise SessionNotFound
        return snapshot

    async def list(
        self, session_id: str, *, limit: int = 50, cursor: str | None = None, principal: Principal | None = None
    ) -> CheckpointPage:
        """One page of the checkpoints of a session, newest first, without their snapshots."""
        if limit < 1:
            raise Invalid("A page has at least one checkpoint.")
        row = await self._get(session_id, principal)
        # One more shows whether there is another page.
        found = await self._store.checkpoints.list(row.session_id, limit + 1, _read_cursor(cursor))
        page = found[:limit]
        return CheckpointPage(page, str(page[-1].number) if len(found) > limit else None)

    async def find(self, session_id: str, checkpoint_id: str, *, principal: Principal | None = None) -> Checkpoint:
        """A checkpoint with its snapshot; `CheckpointNotFound` when it is not kept any more."""
        row = await self._get(session_id, principal)
        found = await self._store.checkpoints.find(row.session_id, checkpoint_id)
        if found is None:
            raise CheckpointNotFound
        return found

    async def roll_back(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        include_logs: bool = False,
        principal: Principal | None = None,
    ) -> SessionRow:
        """Write the state as it was at a checkpoint. What was said and done since stays, and the model is told.

        `include_logs`: also the slices that keep a log. `SessionBusy` while a turn runs or a delivery waits. A session
        that waits for an answer can be rolled back, and waits on.
        """
        row = await self._get(session_id, principal)
        try:
            return await self._store.checkpoints.roll_back(Rollback(row.session_id, checkpoint_id, include_logs))
        except SessionGone:
            raise NoActiveSession("The session has ended; it cannot be rolled back.") from None

    async def tag(
        self, session_id: str, tags: Mapping[str, str | None], *, principal: Principal | None = None
    ) -> SessionRow:
        """Set tags of a session, also of one that has ended; None takes one away, and the others stay."""
        changes = checked_tags(tags)
        row = await self._get(session_id, principal)
        try:
            return await self._store.set_tags(row.session_id, changes)
        except SessionGone:
            raise SessionNotFound from None


def _read_cursor(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 15):
        raise Invalid("The cursor is not one that this server gave out.")
    return int(cursor)


def shown(checkpoint: Checkpoint) -> JsonObject:
    """A checkpoint as JSON, without its snapshot."""
    known: JsonObject = {
        "checkpointId": checkpoint.checkpoint_id,
        "number": checkpoint.number,
        "name": checkpoint.name,
        "planStep": checkpoint.plan_step,
        "turnId": names.turn_id(checkpoint.turn),
        "stepIndex": checkpoint.step,
        "takenAt": checkpoint.taken_at,
        "bytes": checkpoint.size,
    }
    return {name: value for name, value in known.items() if value is not None}
