"""What the store has accepted, told to the workflows. What cannot be told now is told later, by whoever sweeps."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from time import monotonic

from temporalio.client import WorkflowExecutionStatus

from perdure.agents.agent import DEMO
from perdure.agents.registry import AgentRegistry
from perdure.errors import NoDriver, StoreBehind, Unavailable
from perdure.protocol import names
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_TERMINATED, Rebuild, SessionState, read_delivery
from perdure.store.base import Store
from perdure.store.values import CancelRequest, DeliveryRow, NewSession, SessionRow
from perdure.telemetry import spans

from .connect import in_time
from .deliveries import reference
from .driver import Driver, DriverView

log = logging.getLogger("perdure.sessions")

#: After so many seconds without an answer of Temporal, what follows may overtake what it was told.
_HANGS = 0.5


class Signals:
    """Tells drivers what was accepted. Telling twice is telling once: a driver reads each delivery once."""

    def __init__(
        self, store: Store, driver: Driver, agents: AgentRegistry | None = None, *, ui_detail: bool = True
    ) -> None:
        self._store = store
        self._driver = driver
        self._agents = agents
        self._ui_detail = ui_detail
        # Since when Temporal has been told something of a session and has not answered.
        self._telling: dict[str, list[float]] = {}

    async def deliver(self, row: DeliveryRow, *, untold: bool) -> bool:
        """Tell the driver of one delivery; False when that has to wait.

        `untold`: Temporal may not know of earlier ones either. They come first, and so do those that it has been told
        of for some time without an answer.
        """
        if untold or row.ref is None or self._hangs(row.session_id):
            return await self._caught_up(row.session_id)
        return await self._told(row.session_id, self._deliver(row))

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        """Start the driver of a new session; False when that has to wait."""
        state = self._first_state(session, session.token_hash, [ref])
        return await self._told(session.session_id, self._start(state, session.title))

    async def cancel(self, request: CancelRequest) -> bool:
        """Tell the driver that a turn is to be stopped; False when that has to wait. The store knows already."""
        turn_id = names.turn_id(request.turn)
        return await self._told(request.session_id, self._driver.cancel(request.session_id, turn_id))

    async def describe(self, session_id: str) -> DriverView | None:
        """What the session's driver says of itself, compared with the store; None when it cannot say now.

        Either may have been restored from a copy. Then one of them is older than the other, and deliveries would be
        signalled without end to a driver that takes them for done.
        """
        before = await self._store.session(session_id)
        view = await self._driver.describe(session_id)
        if before is None or view is None:
            return view
        now = await self._store.session(session_id)
        if now is None or now.over:
            return view
        if view.head is not None and now.events < view.head:
            message = f"The store has {now.events} events of this session, which has had {view.head}."
            await attend(self._store, session_id, Attention(code=StoreBehind.code, message=message))
        elif view.is_behind(before.turns) or await self._is_dropped(session_id, view):
            log.warning("the driver of session %s is older than the store; it reads the store again", session_id)
            await self._driver.repair(session_id, "rebuild", "DRIVER_BEHIND")
        return view

    async def _is_dropped(self, session_id: str, view: DriverView) -> bool:
        """Whether the driver has done with a delivery that no turn has read."""
        dropped = view.dropped
        return bool(dropped) and any(each.delivery_id in dropped for each in await self._store.unheard(session_id))

    async def catch_up(self, session_id: str, told: set[str] | None = None) -> None:
        """Tell the session's driver everything that it may not know, in order; start it if it never was.

        `told`: the ids of the deliveries that it was told of. They are not told again, and what is told now is added.
        """
        row = await self._store.session(session_id)
        if row is None:
            return
        if not row.over:
            try:
                await self._tell_all(row, set() if told is None else told)
            except NoDriver:
                await restore(self._store, self._driver, row)
        if row.untold:
            # Only now: what is accepted meanwhile must not overtake it. A mark that was added meanwhile stays.
            await self._store.clear_untold(session_id, row.untold)

    async def _told(self, session_id: str, telling: Awaitable[None]) -> bool:
        began = monotonic()
        under_way = self._telling.setdefault(session_id, [])
        under_way.append(began)
        try:
            await telling
        except NoDriver:
            return await self._caught_up(session_id)
        except Exception as error:
            await self._mark(session_id, error)
            return False
        finally:
            under_way.remove(began)
            if not under_way:
                self._telling.pop(session_id, None)
        return True

    def _hangs(self, session_id: str) -> bool:
        under_way = self._telling.get(session_id)
        return bool(under_way) and monotonic() - under_way[0] > _HANGS

    async def _caught_up(self, session_id: str) -> bool:
        try:
            # However much there is to tell, a caller waits no longer than for one answer.
            await in_time(self.catch_up(session_id))
        except Exception as error:
            await self._mark(session_id, error)
            return False
        return True

    async def _mark(self, session_id: str, error: Exception) -> None:
        """What was accepted stays accepted, whatever kept us from telling it."""
        fault = None if isinstance(error, Unavailable | TimeoutError) else error
        log.warning("what was sent to session %s is told later", session_id, exc_info=fault)
        try:
            await self._store.mark_untold(session_id)
        except Exception:
            # The sweeper finds what was accepted all the same; only the order may be another one then.
            log.warning("session %s could not be marked", session_id, exc_info=True)

    async def _tell_all(self, row: SessionRow, told: set[str]) -> None:
        token_hash = await self._store.token_of(row.session_id) or ""
        waiting = await self._store.unheard(row.session_id)
        if row.status == "starting":
            refs = [reference(each, token_hash) for each in waiting]
            await self._start(self._first_state(row, token_hash, refs), row.title)
        for each in waiting:
            if each.delivery_id not in told:
                await self._driver.deliver(row.session_id, reference(each, token_hash))
                told.add(each.delivery_id)
        if row.cancel_turn is not None:
            await self._driver.cancel(row.session_id, names.turn_id(row.cancel_turn))

    def _first_state(
        self, session: NewSession | SessionRow, token_hash: str, waiting: Sequence[JsonObject]
    ) -> SessionState:
        state = SessionState(
            session_id=session.session_id,
            agent=session.agent,
            model=self._model(session.agent),
            mode=session.mode,
            capabilities=session.capabilities,
            token_hash=token_hash,
        )
        for ref in waiting:
            # What a newer build has accepted is left to a driver that can read it: signals bring all that waits.
            if (delivery := read_delivery(ref)) is not None:
                state = state.with_delivery(delivery)
        return state

    async def _start(self, state: SessionState, title: str | None) -> None:
        summary = f"{state.agent}: {title}" if self._ui_detail and title else state.agent
        await self._driver.start(state, summary=summary)

    async def _deliver(self, row: DeliveryRow) -> None:
        await self._driver.deliver(row.session_id, reference(row))

    def _model(self, name: str) -> str | None:
        """What the Temporal UI shows until a model has answered."""
        agent = self._agents.get(name) if self._agents else None
        return (agent.model or DEMO) if agent else None


async def restore(store: Store, driver: Driver, row: SessionRow, *, unattended: bool = False) -> str:
    """The store holds the session as open and no workflow drives it: find out why, and mend it. What was found.

    `unattended`: also when no worker takes up what is started; else that is `NoWorker`.
    """
    session_id = row.session_id
    status = await driver.status(session_id)
    behind = row.attention is not None and row.attention["code"] == StoreBehind.code
    if status is None and behind:
        # It ended in its time, and Temporal has forgotten that since: what to do is an operator's decision still.
        return "the store is older than the session; an operator has to decide"
    match status:
        case WorkflowExecutionStatus.RUNNING | WorkflowExecutionStatus.CONTINUED_AS_NEW:
            return "its workflow runs"
        case WorkflowExecutionStatus.COMPLETED:
            # It told the store so in its time: this store is older than that.
            message = "The session's workflow has ended, and this store does not know of it."
            await attend(store, session_id, Attention(code=StoreBehind.code, message=message))
            return "the store is older than the session; an operator has to decide"
        case WorkflowExecutionStatus.TERMINATED:
            rebuild = Rebuild(reason="WORKFLOW_TERMINATED", ends=OPERATOR_TERMINATED)
        case WorkflowExecutionStatus.CANCELED:
            rebuild = Rebuild(reason="WORKFLOW_CANCELLED", ends=OPERATOR_CANCELLED)
        case None:
            rebuild = Rebuild(reason="WORKFLOW_LOST")
        case _:
            rebuild = Rebuild(reason="WORKFLOW_FAILED")
    await driver.rebuild(session_id, rebuild, unattended=unattended)
    log.warning("session %s had no workflow (%s); it is started from the store", session_id, rebuild.reason)
    return f"it had no workflow ({rebuild.reason}); it is started from the store"


async def attend(store: Store, session_id: str, attention: Attention) -> None:
    """Say that the session cannot go on by itself."""
    if await store.attend(session_id, attention):
        log.warning("session %s needs attention: %s", session_id, attention.code)
        spans.needs_attention(attention.code)
