"""What happens to whole sessions: they are forked, deleted until nothing is left, exported and imported."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from temporalio.client import Client

from perdure.errors import DriverRefused, ForkRefused, Invalid, NoDriver, SessionNotFound, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import Principal
from perdure.protocol.events import EventType, NewEvent, cancel_requested
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.lifecycle import (
    Deletion,
    ExportedRecord,
    ExportedSlot,
    ExportHeader,
    ExportWriter,
    NewFork,
    NewImport,
    left_out_up_to,
    read_export,
)
from perdure.store.values import Commit, NewDelivery, SessionChange, SessionQuery, SessionRow

from . import deliveries
from .connect import ABSENT, RPC_PATIENCE, in_time
from .signals import DriverClient, Signals
from .sweeper import repeating

#: How many earlier turns are looked at for a boundary that can be offered instead.
_LOOKED_AT = 20


@dataclass(frozen=True)
class ForkReceipt:
    """A new session that shares the turns of `parent` up to `turn`, with that turn."""

    session_id: str
    continuation_token: str
    parent: str
    turn: int
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
        turn: int,
        step: int | None,
        principal: Principal,
        idempotency_key: str | None,
    ) -> ForkReceipt:
        if turn < 0 or (step is not None and step < 0):
            raise Invalid("A session is forked at the end of a turn; turns and steps are numbered from 0.")
        first = await self.first(parent.session_id, turn, step, principal, idempotency_key)
        if first is not None:
            return first
        session_id = deliveries.session_id()
        delivery = _key_holder(session_id, parent.session_id, turn, step, principal, idempotency_key)
        await self._check_boundary(parent, turn, step)
        token_hash = hash_token(derive_token(self._secret, session_id))
        bounds = deliveries.bounds_of(self._signals.limits(parent.agent))
        forked = await self._store.fork(NewFork(session_id, token_hash, parent.session_id, turn, delivery, bounds))
        return await self._receipt(forked.session_id, parent.session_id, turn, fresh=forked.fresh)

    async def first(
        self, parent_id: str, turn: int, step: int | None, principal: Principal, idempotency_key: str | None
    ) -> ForkReceipt | None:
        """The receipt of a repeated request; its parent may have been deleted since."""
        delivery = _key_holder("", parent_id, turn, step, principal, idempotency_key)
        first = await self._store.first(delivery) if delivery else None
        return await self._receipt(first.delivery.session_id, parent_id, turn, fresh=False) if first else None

    async def _receipt(self, session_id: str, parent_id: str, turn: int, *, fresh: bool) -> ForkReceipt:
        row = await self._store.session(session_id)
        if row is None:
            raise SessionNotFound
        started = not row.is_new_fork or await self._signals.start_with_turns(row)
        return ForkReceipt(
            session_id=session_id,
            continuation_token=derive_token(self._secret, session_id),
            parent=parent_id,
            turn=turn,
            deduplicated=not fresh,
            delayed=not started,
        )

    async def _check_boundary(self, parent: SessionRow, turn: int, step: int | None) -> None:
        """`ForkRefused` when the session cannot be forked there, with the next earlier turn where it can."""
        if parent.records_expired:
            raise ForkRefused("The records of this session have expired.", reason="records_expired")
        problem = await self._problem(parent, turn, step)
        if problem is None:
            return
        reason, sentence = problem
        before = min(turn, parent.turns) - 1
        for earlier in range(before, max(-1, before - _LOOKED_AT), -1):
            if await self._problem(parent, earlier, None) is None:
                raise ForkRefused(sentence, reason=reason, nearest={"turn": earlier})
        raise ForkRefused(sentence, reason=reason)

    async def _problem(self, parent: SessionRow, turn: int, step: int | None) -> tuple[str, str] | None:
        if turn >= parent.turns:
            return "turn_not_begun", f"Turn {turn} has not begun; the session has {parent.turns} turns."
        return await _boundary_problem(self._store, parent.session_id, turn, step)


async def _boundary_problem(
    store: Store, session_id: str, turn: int, step: int | None = None
) -> tuple[str, str] | None:
    """Why this turn is no boundary: a code, and a sentence."""
    # Imported late: an API loads the libraries of models only when it needs them.
    from perdure.harness.rebuild import boundary_problem, read_end

    return boundary_problem(turn, step, await read_end(store, session_id, turn))


def _key_holder(
    session_id: str, parent: str, turn: int, step: int | None, principal: Principal, key: str | None
) -> NewDelivery | None:
    """The delivery that holds the idempotency key of a fork, like that of each request that starts a session."""
    if key is None:
        return None
    about = json.dumps({"about": ["fork", parent, turn, step]}, sort_keys=True)
    return NewDelivery(
        session_id=session_id,
        delivery_id=deliveries.delivery_id(),
        body={"kind": "fork"},
        owner=principal.owner,
        idempotency_key=key,
        digest=hashlib.sha256(about.encode()).hexdigest(),
    )


log = logging.getLogger("perdure.sessions")

#: Rows of one transaction; executions of one pass, and how many of them are deleted at once; sessions of one sweep.
_BATCH = 500
_EXECUTIONS = 10_000
_AT_ONCE = 8
_SESSIONS = 200

#: For how many seconds a turn may stop by itself; it is the time that its driver gives it, and some more.
_STOP_SECONDS = 45.0
#: For how many seconds a sweep deletes rows of one session: others wait.
_SWEEP_SECONDS = 30.0
#: Seconds between two looks at a session that ends, and at what Temporal lists of it.
_LOOK = 0.1
_LISTED = 0.5
#: For how many seconds Temporal must have listed nothing: its list is behind what was just started.
SETTLED = 3.0
#: How long an owner can see the receipt, and late retries of its requests are refused.
_REMEMBERED = 30 * 86_400.0

_CODE = "SESSION_DELETED"
_SENTENCE = "The session was deleted."


@dataclass(frozen=True)
class _Execution:
    workflow_id: str
    run_id: str


@dataclass
class _Search:
    """What this process knows of the executions of a session that is being deleted."""

    # Those whose deletion was requested: they are still listed for some time.
    requested: set[_Execution] = field(default_factory=set[_Execution])
    # Since when every look has found none.
    empty_since: float | None = None


class Deletions:
    """Deletes sessions for good. Each step may be repeated, and several processes may delete one session at once."""

    def __init__(
        self, store: Store, driver: DriverClient, client: Client, *, every: float = 5.0, stop: float = _STOP_SECONDS
    ) -> None:
        self._store = store
        self._driver = driver
        self._client = client
        self._every = every
        self._stop = stop
        self._searches: dict[str, _Search] = {}

    async def delete(
        self, session_id: str, principal: Principal | None, patience: float, *, until_gone: bool = False
    ) -> Deletion:
        """Delete the session, for `patience` seconds; what is left then is for the sweeper.

        It returns when all rows are deleted; with `until_gone`, when Temporal has deleted its executions as well.
        With `principal`, `SessionNotFound` unless it owns the session, or did.
        """
        deletion = await self._begin(session_id, principal)
        until = monotonic() + patience
        signal = True
        while deletion.finished_at is None:
            try:
                gone = await self._advance(deletion, until, signal=signal)
            except Unavailable:
                # The store or Temporal is away. The tombstone is written, so the sweeper continues.
                break
            if monotonic() > until or (gone and not until_gone):
                break
            signal = False
            await asyncio.sleep(_LISTED if gone else _LOOK)
            deletion = await self._store.deletion(session_id) or deletion
        return await self._store.deletion(session_id) or deletion

    async def owned(self, owner: str) -> AsyncGenerator[str]:
        """The ids of the owner's sessions, newest first, so that forks go before their parents."""
        cursor: str | None = None
        while True:
            page = await self._store.sessions(SessionQuery(owner=owner, limit=_SESSIONS, cursor=cursor))
            for row in page.sessions:
                yield row.session_id
            if (cursor := page.next_cursor) is None:
                return

    def running(self) -> AbstractAsyncContextManager[None]:
        """Resume deletions repeatedly while this context is open."""
        return repeating(
            self.sweep,
            (self._every * 0.8, self._every * 1.2),
            away="deletions cannot be resumed now",
            failed="deletions could not be resumed",
        )

    async def sweep(self) -> None:
        """Resume every deletion that is not finished, and forget old ones."""
        unfinished = await self._store.unfinished_deletions(_SESSIONS)
        for session_id in self._searches.keys() - set(unfinished):
            deletion = await self._store.deletion(session_id)
            if deletion is None or deletion.finished_at is not None:
                # Another process has finished it.
                self._searches.pop(session_id, None)
        for session_id in unfinished:
            deletion = await self._store.deletion(session_id)
            try:
                if deletion is not None:
                    await self._advance(deletion, monotonic() + _SWEEP_SECONDS, signal=True)
            except Unavailable as error:
                log.warning("the deletion of session %s is resumed later: %s", session_id, error.message)
            except Exception:
                log.exception("session %s could not be deleted; it will be tried again", session_id)
        await self._store.forget_deletions(_REMEMBERED, _BATCH)

    async def _begin(self, session_id: str, principal: Principal | None) -> Deletion:
        row = await self._store.session(session_id)
        if principal is not None and row is not None and row.principal.owner != principal.owner:
            raise SessionNotFound
        deletion = await self._store.begin_deletion(session_id)
        if deletion is None or (principal is not None and not deletion.belongs_to(principal.owner)):
            raise SessionNotFound
        return deletion

    async def _advance(self, deletion: Deletion, until: float, *, signal: bool) -> bool:
        """Do what can be done until then; False while rows are left. `signal`: the driver may not know yet."""
        session_id = deletion.session_id
        row = await self._store.session(session_id)
        if row is not None and not row.ended and not await self._ended(row, deletion, signal=signal):
            return False
        while not await self._store.purge(session_id, _BATCH):
            if monotonic() > until:
                return False
            # Others may write between two transactions.
            await asyncio.sleep(0)
        executions = await self._delete_executions(session_id)
        if executions is not None:
            await self._store.finish_deletion(session_id, executions)
        return True

    # --- the end of the session ---

    async def _ended(self, row: SessionRow, deletion: Deletion, *, signal: bool) -> bool:
        """End the session; False while its turn is stopping."""
        age = (datetime.now(UTC) - datetime.fromisoformat(deletion.requested_at)).total_seconds()
        if row.status == "running" and age < self._stop:
            if not signal:
                return False
            # As an operator ends it: no effect begins from now on, and the turn is cancelled before the session ends.
            await self._store.cancel(row.session_id, None, cancel_requested)
            try:
                await self._driver.repair(row.session_id, "fail")
            except NoDriver:
                pass
            else:
                return False
        # No turn runs, or none that a worker would stop. Whatever still writes is refused from now on.
        error = {"code": _CODE, "message": _SENTENCE}
        event = NewEvent(
            type=EventType.SESSION_FAILED,
            key=names.session_key("closed"),
            data={**error, "sessionId": row.session_id},
        )
        change = SessionChange(status="failed", error=error)
        await self._store.commit(
            Commit(row.session_id, events=(event,), close=True, settles_cancel=True, change=change)
        )
        return True

    # --- Temporal ---

    async def _delete_executions(self, session_id: str) -> int | None:
        """Delete the session's executions; how many there were, or None while there may be some.

        Temporal deletes them when it has processed their end, which takes about half a minute. What was started just
        before is not listed at once, so one empty list proves nothing: the next ones some seconds later must be empty
        as well.
        """
        # It may have ended by itself.
        with contextlib.suppress(NoDriver, DriverRefused):
            await self._driver.terminate(session_id, _SENTENCE)
        search = self._searches.setdefault(session_id, _Search())
        found = await self._listed(session_id)
        fresh = [each for each in found if each not in search.requested]
        for start in range(0, len(fresh), _AT_ONCE):
            await asyncio.gather(*(self._delete_execution(each) for each in fresh[start : start + _AT_ONCE]))
        search.requested.update(fresh)
        if found:
            search.empty_since = None
            return None
        now = monotonic()
        if search.empty_since is None:
            search.empty_since = now
        if now - search.empty_since < SETTLED:
            return None
        self._searches.pop(session_id, None)
        return len(search.requested)

    async def _listed(self, session_id: str) -> Sequence[_Execution]:
        """Some of the executions of the session's driver and turns."""
        query = f"WorkflowId = '{session_id}' OR WorkflowId STARTS_WITH '{session_id}/'"

        async def listed() -> list[_Execution]:
            found = self._client.list_workflows(query, page_size=1000, limit=_EXECUTIONS)
            return [_Execution(each.id, each.run_id) async for each in found]

        try:
            return await in_time(listed(), 2 * RPC_PATIENCE)
        except ABSENT as error:
            raise Unavailable("Temporal cannot be reached; try again.") from error

    async def _delete_execution(self, execution: _Execution) -> None:
        try:
            await self._driver.delete(execution.workflow_id, execution.run_id)
        except DriverRefused as refused:
            raise Unavailable("Temporal does not take it now; try again.") from refused


# --- exports ------------------------------------------------------------------------------------------------


async def export_session(store: Store, session_id: str) -> AsyncGenerator[bytes]:
    """The lines of the session's export: its turns up to the last boundary, and its state of that time.

    It has no token. Memory is bounded by the largest turn.
    """
    from perdure.harness.rebuild import is_between_turns

    row = await store.session(session_id)
    if row is None:
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
    for turn in range(row.turns - 1, -1, -1):
        if await _boundary_problem(store, row.session_id, turn) is None:
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
        bounds=deliveries.bounds_of(signals.known_limits(export.header.agent)),
    )
    await store.import_session(new)
    row = await store.session(session_id)
    if row is None:
        raise SessionNotFound
    await signals.start_with_turns(row)
    return row
