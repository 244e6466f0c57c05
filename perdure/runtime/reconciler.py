"""Compares the open sessions of the store with the running workflows, reports differences and repairs them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from time import monotonic

from perdure.errors import CannotReplay, NoDriver, NoWorker, StoreBehind, Unavailable
from perdure.protocol.requests import Attention
from perdure.session.state import Rebuild
from perdure.store.base import Store
from perdure.store.values import Commit

from .deploys.unserved import Run
from .drivers.client import DriverClient
from .drivers.lost import end_if_deleted, set_attention, start_lost_driver
from .sweeper import repeating

log = logging.getLogger("perdure.sessions")

_PAGE = 1000
#: After how many failed sessions in a row Temporal counts as unreachable.
_FAILED_SESSIONS = 20
#: For how many seconds a session whose workflow cannot be replayed waits for a build that can, such as the last one.
_REPLAY_PATIENCE = 120.0
#: It waits so many times as long while a turn runs to which nothing has happened.
_TURN_PATIENCE = 5


@dataclass(frozen=True)
class Disagreement:
    """Open sessions without a running workflow, and running workflows without a session."""

    undriven: Sequence[str]
    orphans: Sequence[str]
    # How many of the running workflows belong to a session of this store.
    driven: int = 0
    # The result for each session without a workflow.
    mended: Mapping[str, str] = field(default_factory=dict[str, str])


class Reconciler:
    """Compares all open sessions with all running drivers. Several may run at once."""

    def __init__(
        self,
        store: Store,
        driver: DriverClient,
        *,
        every: float = 30.0,
        replay_patience: float = _REPLAY_PATIENCE,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._store = store
        self._driver = driver
        self._every = every
        self._replay_patience = replay_patience
        # Since when runs cannot be replayed, and the sessions of those that were found last.
        self._unreplayable: dict[Run, float] = {}
        self._attended: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        # Whether the log has the warning that there is no worker.
        self._warned_unattended = False

    def running(self) -> AbstractAsyncContextManager[None]:
        """Compare repeatedly while this context is open."""
        return repeating(
            self.reconcile,
            (self._every * 0.5, self._every),
            away="the store and Temporal cannot be compared now",
            failed="the store and Temporal could not be compared",
        )

    async def find(self) -> Disagreement:
        """Compare once. Temporal's lists are some seconds old, so each difference has to be checked again."""
        known: set[str] = set()
        after = ""
        # The store is read first: a session that starts in between is in Temporal's list only, and is looked up below.
        while page := await self._store.open_sessions(after, _PAGE):
            after = page[-1]
            known.update(page)
        driven = {session_id async for session_id in self._driver.running()}
        orphans = [each for each in sorted(driven - known) if not await self._is_known(each)]
        return Disagreement(undriven=sorted(known - driven), orphans=orphans, driven=len(driven & known))

    async def reconcile(self) -> Disagreement:
        """Compare once, start sessions without a driver from the store, and report workflows without a session."""
        found = await self.find()
        mended = await self._start_lost_drivers(found.undriven)
        # Started while the session was deleted, by a process that has died since.
        deleted = [each for each in found.orphans if await end_if_deleted(self._store, self._driver, each)]
        found = replace(found, orphans=[each for each in found.orphans if each not in deleted])
        if fresh := frozenset(found.orphans) - self._reported:
            some = ", ".join(sorted(fresh)[:5])
            log.warning(
                "%d workflows belong to no session of this store (%s); `perdure sessions reconcile` lists them",
                len(found.orphans),
                some,
            )
        self._reported = frozenset(found.orphans)
        await self._driver.find_unserved()
        await self._replace_unreplayable()
        return replace(found, mended=mended)

    async def end_orphans(self, orphans: Sequence[str]) -> None:
        for session_id in orphans:
            # It may have ended meanwhile.
            with contextlib.suppress(NoDriver):
                await self._driver.terminate(session_id, "The store holds no such session.")

    async def _is_known(self, session_id: str) -> bool:
        """Whether the store has the session, also one that this build cannot read."""
        return await self._store.token_of(session_id) is not None or bool(await self._store.events(session_id, 0, 1))

    async def _start_lost_drivers(self, undriven: Sequence[str]) -> Mapping[str, str]:
        """Start sessions from the store. The result for each session that was checked."""
        mended: dict[str, str] = {}
        failed, unattended = 0, False
        for session_id in undriven:
            try:
                result = await self._start_lost_driver(session_id)
            except NoWorker as none:
                # Continue with the others: a session whose workflow has completed needs no worker.
                result, unattended = f"it waits for a worker: {none.message}", True
                if not self._warned_unattended:
                    log.warning(
                        "%s Sessions without a workflow are started from the store once one does.", none.message
                    )
                    self._warned_unattended = True
            if result is not None:
                mended[session_id] = result
            failed = failed + 1 if result is None else 0
            if failed >= _FAILED_SESSIONS:
                log.warning("Temporal cannot be reached; the store and Temporal are compared later")
                return mended
        self._warned_unattended = unattended
        return mended

    async def _start_lost_driver(self, session_id: str) -> str | None:
        """Start one session from the store; None when Temporal or the store could not be reached."""
        try:
            row = await self._store.session(session_id)
            # The sweeper starts a session that has not begun.
            if row is None or row.ended or row.status == "starting":
                return "it needs no workflow now"
            return await start_lost_driver(self._store, self._driver, row)
        except NoWorker:
            raise
        except Unavailable:
            return None
        except Exception:
            log.exception("session %s could not be started from the store", session_id)
            return "it could not be started from the store; the log says why"

    async def _replace_unreplayable(self) -> None:
        """Start sessions from the store whose workflow no worker has been able to replay for some time."""
        now, runs = self._clock(), await self._driver.unreplayable()
        if runs is None:
            return
        fresh = sum(run not in self._unreplayable for run in runs.values())
        if fresh:
            log.error(
                "the workers cannot replay %d sessions: were workflows changed without a patch? The APIs "
                "start them from the store after %g seconds, unless workers that can replay them run by then",
                *(fresh, self._replay_patience),
            )
        self._unreplayable = {run: self._unreplayable.get(run, now) for run in runs.values()}
        recovered, self._attended = self._attended - runs.keys(), frozenset(runs)
        for session_id in (*runs, *recovered):
            try:
                await self._replace_one(session_id, runs.get(session_id), now)
            except (NoDriver, NoWorker, Unavailable) as error:
                log.debug("session %s is looked at again later: %s", session_id, error.message)
            except Exception:
                log.exception("session %s could not be started from the store", session_id)

    async def _replace_one(self, session_id: str, run: Run | None, now: float) -> None:
        """Replace the session's driver if it is time; without a `run`, it has recovered."""
        row = await self._store.session(session_id)
        code = row.attention["code"] if row is not None and row.attention is not None else None
        if row is None or code == StoreBehind.code:
            # It is reported as a workflow without a session; or an operator has to decide.
            return
        if run is None:
            if code == CannotReplay.code:
                await self._store.commit(Commit(session_id, recovers=True))
            return
        patience = self._replay_patience
        if row.status == "running" and run.workflow_id == session_id and row.run is None:
            # Its turn, which would end with it, can be replayed. A run has none, and loses nothing.
            patience *= _TURN_PATIENCE
        if now - self._unreplayable[run] < patience:
            message = "The workers cannot replay the workflow of this session."
            await set_attention(self._store, session_id, Attention(code=CannotReplay.code, message=message))
        elif await self._driver.replace(session_id, run, Rebuild(reason=CannotReplay.code), of=row):
            # If it is listed again, something else is wrong.
            self._unreplayable[run] = now
            await end_if_deleted(self._store, self._driver, session_id)
            log.warning("session %s could not be replayed; it is started from the store", session_id)
