"""Sessions that begin with recorded turns: forks, and those that are imported from an export."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from perdure.agents.registry import bounds_of
from perdure.errors import CheckpointNotFound, ForkRefused, Invalid, SessionNotFound, UnreadableState
from perdure.protocol.deliveries import Principal
from perdure.protocol.wire import JsonObject
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.lifecycle import (
    ExportedRecord,
    ExportedSlot,
    ExportHeader,
    ExportWriter,
    NewFork,
    NewImport,
    leaves_out,
    left_out_up_to,
    read_export,
)
from perdure.store.values import NewRecord, SessionRow

from . import deliveries
from .signals import Signals

#: How many earlier steps and turns are looked at for a boundary that can be offered instead.
_LOOKED_AT = 20


@dataclass(frozen=True)
class ForkPlace:
    """Where a session is forked: at the end of a turn or of a step; also of the step in which a checkpoint was taken.

    A checkpoint has no turn and no step here: it may be dropped, and a repeated request must be the same then.
    """

    turn: int | None = None
    step: int | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if (self.turn is None) == (self.checkpoint is None) or (self.turn is None and self.step is not None):
            raise Invalid("A session is forked at a turn, with or without a step of it, or at a checkpoint.")
        if not all(0 <= number < 2**53 for number in (self.turn or 0, self.step or 0)):
            raise Invalid("A session is forked at the end of a turn or of a step; both are numbered from 0.")


@dataclass(frozen=True)
class ForkReceipt:
    """A new session that shares the turns of `parent` up to `turn`, with that turn or with its steps up to `step`."""

    session_id: str
    continuation_token: str
    parent: str
    turn: int
    # As it was requested.
    step: int | None = None
    # The first receipt of a repeated request.
    deduplicated: bool = False
    # The workflow is started later.
    delayed: bool = False


class Forks:
    """Forks sessions. A fork is a session of its own from its first event on."""

    def __init__(self, store: Store, signals: Signals, secret: bytes) -> None:
        self._store = store
        self._signals = signals
        self._secret = secret

    async def fork(
        self,
        parent: SessionRow,
        place: ForkPlace,
        principal: Principal,
        idempotency_key: str | None,
    ) -> ForkReceipt:
        session_id = deliveries.session_id()
        delivery = _key_holder(session_id, parent.session_id, place, principal, idempotency_key)
        turn, step = await self._boundary(parent, place)
        cut = await self._checked_cut(parent, turn, step)
        token_hash = hash_token(derive_token(self._secret, session_id))
        bounds = bounds_of(self._signals.limits(parent.agent))
        fork = NewFork(session_id, token_hash, parent.session_id, turn, delivery, bounds, step, cut)
        forked = await self._store.fork(fork)
        return await self._receipt(forked.session_id, parent.session_id, place, fresh=forked.fresh)

    async def first(
        self, parent_id: str, place: ForkPlace, principal: Principal, idempotency_key: str | None
    ) -> ForkReceipt | None:
        """The receipt of a repeated request; its parent may have been deleted since."""
        delivery = _key_holder("", parent_id, place, principal, idempotency_key)
        first = await self._store.first(delivery) if delivery else None
        return await self._receipt(first.delivery.session_id, parent_id, place, fresh=False) if first else None

    async def _boundary(self, parent: SessionRow, place: ForkPlace) -> tuple[int, int | None]:
        """The last turn that is shared, and the last step of it."""
        if place.checkpoint is None:
            assert place.turn is not None
            return place.turn, place.step
        found = await self._store.checkpoints.find(parent.session_id, place.checkpoint)
        if found is None:
            raise CheckpointNotFound
        return found.turn, found.step

    async def _receipt(self, session_id: str, parent_id: str, place: ForkPlace, *, fresh: bool) -> ForkReceipt:
        row = await self._store.session(session_id)
        if row is None:
            raise SessionNotFound
        turn, step = place.turn, place.step
        if turn is None:
            # Only builds that know checkpoints fork there, and these keep the place.
            assert row.fork_place is not None
            turn, step = row.fork_place["turn"], row.fork_place.get("step")
        started = not row.is_new_fork or await self._signals.start_with_turns(row)
        return ForkReceipt(
            session_id=session_id,
            continuation_token=derive_token(self._secret, session_id),
            parent=parent_id,
            turn=turn,
            step=step,
            deduplicated=not fresh,
            delayed=not started,
        )

    async def _checked_cut(self, parent: SessionRow, turn: int, step: int | None) -> NewRecord | None:
        """The record that ends the last shared turn, if a part of it is shared.

        `ForkRefused` when the session cannot be forked there, with the nearest earlier place where it can.
        """
        # Imported late: an API loads the libraries of models only when it needs them, and serves others meanwhile.
        await asyncio.to_thread(import_module, "perdure.harness.rebuild")
        from perdure.harness.rebuild import boundary_problem, cut_after, is_cut_by, read_end

        if parent.records_expired:
            raise ForkRefused("The records of this session have expired.", reason="records_expired")
        if turn >= parent.turns:
            problem = "turn_not_begun", f"Turn {turn} has not begun; the session has {parent.turns} turns."
        elif leaves_out(parent.left_out, turn):
            problem = "left_out", f"Turn {turn} is left out of prompts since a restore."
        else:
            try:
                end = await read_end(self._store, parent.session_id, turn, step)
                problem = boundary_problem(turn, step, end)
                if problem is None:
                    return cut_after(turn, step) if is_cut_by(step, end) else None
            except UnreadableState as unreadable:
                problem = "unreadable", f"Turn {turn} cannot be read by this version: {unreadable.message}"
        reason, sentence = problem
        nearest = await self._nearest(parent, min(turn, parent.turns), step)
        raise ForkRefused(sentence, reason=reason, **({} if nearest is None else {"nearest": nearest}))

    async def _nearest(self, parent: SessionRow, turn: int, step: int | None) -> JsonObject | None:
        """The nearest boundary before this place: a step of the turn, or the end of an earlier turn."""
        from perdure.harness.rebuild import boundary_problem, read_end

        async def is_boundary(place: int, inside: int | None) -> bool:
            if leaves_out(parent.left_out, place):
                return False
            try:
                end = await read_end(self._store, parent.session_id, place, inside)
                return boundary_problem(place, inside, end) is None
            except UnreadableState:
                return False

        if turn < parent.turns:
            last = (await read_end(self._store, parent.session_id, turn)).last_step
            begin = last if step is None else min(step - 1, last)
            for before in range(begin, max(-1, begin - _LOOKED_AT), -1):
                if await is_boundary(turn, before):
                    return {"turn": turn, "step": before}
        for earlier in range(turn - 1, max(-1, turn - 1 - _LOOKED_AT), -1):
            if await is_boundary(earlier, None):
                return {"turn": earlier}
        return None


def _key_holder(
    session_id: str, parent: str, place: ForkPlace, principal: Principal, key: str | None
) -> NewDelivery | None:
    """The delivery that holds the idempotency key of a fork, like that of each request that starts a session."""
    if key is None:
        return None
    where = [place.turn, place.step] if place.checkpoint is None else ["checkpoint", place.checkpoint]
    about = json.dumps({"about": ["fork", parent, *where]}, sort_keys=True)
    return NewDelivery(
        session_id=session_id,
        delivery_id=deliveries.delivery_id(),
        body={"kind": "fork"},
        owner=principal.owner,
        idempotency_key=key,
        digest=hashlib.sha256(about.encode()).hexdigest(),
    )


# --- exports ------------------------------------------------------------------------------------------------


async def export_session(store: Store, session_id: str) -> AsyncGenerator[bytes]:
    """The lines of the session's export: its turns up to the last boundary, and its state of that time.

    It has no token. Memory is bounded by the largest turn.
    """
    from perdure.harness.rebuild import is_between_turns

    row = await store.session(session_id)
    if row is None or row.run is not None:
        raise SessionNotFound(f"The store knows no session {session_id}.")
    if row.records_expired:
        raise Invalid("The records of this session have expired; it cannot be exported.")
    last = await _last_boundary(store, row)
    slots = await store.slots_at(session_id, last)
    writer = ExportWriter()
    header = ExportHeader(
        export_id=f"exp_{deliveries.ulid()}",
        exported_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        agent=row.agent,
        mode=row.mode,
        capabilities=row.capabilities,
        principal=row.principal,
        title=row.title,
        turns=last + 1,
        left_out=tuple(left_out_up_to(row.left_out, last)),
    )
    yield writer.line(header)
    for slot in sorted(slots, key=lambda each: each.name):
        yield writer.line(ExportedSlot(name=slot.name, value=slot.value, version=slot.version))
    # What was done to the model's history since the last turn is in the journal of the next one.
    is_last = last == row.turns - 1
    silent: list[int] = []
    for turn in range(last + 1 + is_last):
        records = await store.records(session_id, from_turn=turn, to_turn=turn)
        if turn <= last and not records:
            silent.append(turn)
        for record in records:
            if turn > last and not is_between_turns(record):
                continue
            body = {name: value for name, value in record.body.items() if name != "tokenHash"}
            yield writer.line(
                ExportedRecord(
                    turn=record.turn, step=record.step, key=record.key, format=record.format, body=body, at=record.at
                )
            )
    if (now := await store.session(session_id)) is None:
        raise SessionNotFound(f"The session {session_id} was deleted meanwhile; the export is incomplete.")
    if now.records_expired:
        raise Invalid(f"The records of {session_id} have expired meanwhile; the export is incomplete.")
    yield writer.end(silent)


async def _last_boundary(store: Store, row: SessionRow) -> int:
    from perdure.harness.rebuild import boundary_problem, read_end

    for turn in range(row.turns - 1, -1, -1):
        if boundary_problem(turn, None, await read_end(store, row.session_id, turn)) is None:
            return turn
    raise Invalid("No turn of this session has ended; there is nothing to export.")


async def import_session(
    store: Store,
    signals: Signals,
    secret: bytes,
    path: Path,
    *,
    principal: Principal | None = None,
    again: bool = False,
) -> SessionRow:
    """Create a session from an export. `again`: also when the file was imported before.

    The file is read twice: nothing is written before it has proved to be complete and readable.
    """
    from perdure.harness.rebuild import check_turn, slots_of

    export = await asyncio.to_thread(read_export, path, check_turn)
    owner = principal or export.header.principal
    export = replace(export, slots=slots_of(export, owner))
    session_id = deliveries.session_id()
    delivery = NewDelivery(
        session_id=session_id,
        delivery_id=deliveries.delivery_id(),
        body={"kind": "import"},
        owner="perdure/import",
        idempotency_key=export.header.export_id,
        digest=export.sha256,
    )
    new = NewImport(
        session_id=session_id,
        token_hash=hash_token(derive_token(secret, session_id)),
        export=export,
        principal=owner,
        delivery=None if again else delivery,
        bounds=bounds_of(signals.known_limits(export.header.agent)),
    )
    await store.import_session(new)
    row = await store.session(session_id)
    if row is None:
        raise SessionNotFound
    await signals.start_with_turns(row)
    return row
