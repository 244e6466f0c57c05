"""Deletes sessions until nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic

from temporalio.client import Client

from perdure.errors import DriverRefused, NoDriver, SessionNotFound, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import Principal
from perdure.protocol.events import EventType, NewEvent, cancel_requested
from perdure.store.base import Store
from perdure.store.lifecycle import Deletion
from perdure.store.runs import RunQuery
from perdure.store.values import Commit, SessionChange, SessionQuery, SessionRow

from .connect import ABSENT, RPC_PATIENCE, in_time
from .drivers.client import DriverClient
from .sweeper import repeating

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
#: For how many seconds the end of a session stays, so that those who read its events see it.
_NOTICED = 0.25
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
        """The ids of the owner's runs and sessions, newest first, so that forks go before their parents.

        Runs come before all others: one that went on could start a session that nobody sees here. Children come after
        all others: they are deleted with their parents, which must not go on without them.
        """
        async for run_id in self._runs(owner):
            yield run_id
        for children in (False, True):
            cursor: str | None = None
            while True:
                page = await self._store.sessions(SessionQuery(owner=owner, limit=_SESSIONS, cursor=cursor))
                for row in page.sessions:
                    if (row.parent is not None) is children:
                        yield row.session_id
                if (cursor := page.next_cursor) is None:
                    break

    async def _runs(self, owner: str) -> AsyncGenerator[str]:
        query = RunQuery(owner=owner, limit=_SESSIONS)
        while True:
            page = await self._store.runs(query)
            for each in page.runs:
                yield each.run_id
            if page.next is None:
                return
            query = replace(query, after=page.next)

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
        while not await self._store.delete_children(session_id, _BATCH):
            if monotonic() > until:
                return False
        row = await self._store.session(session_id)
        # The session stops before its children: it would go on with their failures.
        ended = row is None or row.ended or await self._ended(row, deletion, signal=signal)
        parts_ended = await self._advance_parts(session_id, until, signal=signal)
        if not (ended and parts_ended):
            return False
        if row is not None:
            await _until_noticed(await self._store.session(session_id))
        while not await self._store.purge(session_id, _BATCH):
            if monotonic() > until:
                return False
            # Others may write between two transactions.
            await asyncio.sleep(0)
        executions = await self._delete_executions(session_id)
        if executions is not None:
            await self._store.finish_deletion(session_id, executions)
        return True

    async def _advance_parts(self, session_id: str, until: float, *, signal: bool) -> bool:
        """The same for the deletions of the session's children, which are a part of its own."""
        parts = await self._store.unfinished_parts(session_id, _SESSIONS)

        async def advance(part: str) -> bool:
            deletion = await self._store.deletion(part)
            return deletion is None or await self._advance(deletion, until, signal=signal)

        results: list[bool | BaseException] = []
        for start in range(0, len(parts), _AT_ONCE):
            some = parts[start : start + _AT_ONCE]
            results += await asyncio.gather(*map(advance, some), return_exceptions=True)
        # One that fails has stopped none of the others.
        for failed in (each for each in results if isinstance(each, BaseException)):
            raise failed
        return len(parts) < _SESSIONS and all(results)

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
        if fresh:
            # Another process may begin to look when Temporal lists none any more, and finish.
            await self._store.count_executions(session_id, len(search.requested))
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


async def _until_noticed(ended: SessionRow | None) -> None:
    """Wait until the end of the session is so old that its readers have seen it."""
    if ended is not None:
        age = (datetime.now(UTC) - datetime.fromisoformat(ended.updated_at)).total_seconds()
        # Clocks differ: the wait is never longer.
        await asyncio.sleep(min(_NOTICED, max(0.0, _NOTICED - age)))
