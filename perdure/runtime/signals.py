"""Signals to the workflows that drive sessions. The sweeper repeats signals that failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Literal

from perdure.agents.agent import DEMO, Lane, Limits
from perdure.agents.registry import AgentRegistry
from perdure.bounds import quoted
from perdure.errors import AgentNotFound, BuildGone, InvalidDeclaration, NoDriver, StoreBehind, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import MAIN
from perdure.protocol.events import cancel_requested
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.session.children import parent_ref
from perdure.session.state import SessionState, read_delivery
from perdure.session.view import DriverView
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, DeliveryRow
from perdure.store.values import LaneSettings, NewSession, SessionRow

from .connect import in_time
from .deliveries import reference
from .drivers.client import DriverClient
from .drivers.lost import end_if_deleted, set_attention, start_lost_driver

log = logging.getLogger("perdure.sessions")

#: What can be set for a lane of one session.
LANE_FIELDS = ("mode", "cap", "overflow")

#: A signal without an answer after so many seconds may be overtaken by the next one.
_SLOW_SECONDS = 0.5


class Signals:
    """Signals drivers. Repeating a signal is safe: a driver ignores a delivery that it knows."""

    def __init__(
        self, store: Store, driver: DriverClient, agents: AgentRegistry | None = None, *, ui_detail: bool = True
    ) -> None:
        self._store = store
        self._driver = driver
        self._agents = agents
        self._ui_detail = ui_detail
        # When the signals began, by session, that Temporal has not answered yet.
        self._in_flight: dict[str, list[float]] = {}

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool:
        """Signal one delivery to the driver; False when it has to be signalled later, or no worker can read it now.

        `unsignalled`: the driver may not have received earlier deliveries. To keep the order, all waiting deliveries
        are signalled then, and also while an earlier signal has no answer for some time.
        """
        if unsignalled or row.ref is None or self._is_slow(row.session_id):
            sent = await self.deliver_all(row.session_id)
        else:
            sent = await self._send(row.session_id, self._driver.deliver(row.session_id, reference(row)))
        return sent and row.session_id not in self._driver.unserved

    def limits(self, agent: str) -> Limits:
        """What the agent declares, if this process knows it."""
        known = self._agents.get(agent) if self._agents else None
        return known.limits if known else Limits()

    def lanes(self, agent: str) -> Mapping[str, Lane]:
        """The lanes that the agent declares, if this process knows it."""
        known = self._agents.get(agent) if self._agents else None
        return known.lanes if known else {}

    def lane(self, agent: str, lane: str = MAIN) -> Lane:
        """What the agent declares for a lane, if this process knows it."""
        return self.lanes(agent).get(lane, Lane())

    async def lane_of(self, session_id: str | None, lane: str) -> Lane:
        """What holds for the next message for a lane of this session; None: there is no session yet."""
        known = None if session_id is None else await self._store.lane_settings(session_id)
        return Lane() if known is None else self.lane_as_set(known, lane)

    def lane_as_set(self, known: LaneSettings, lane: str) -> Lane:
        settings = self.lane(known.agent, lane)
        for field, value in known.lanes.get(lane, {}).items():
            if field in LANE_FIELDS:
                # A newer build may have set what this one does not know.
                with suppress(InvalidDeclaration):
                    settings = replace(settings, **{field: value})
        return settings

    def known_limits(self, agent: str) -> Limits:
        """The same; `AgentNotFound` if this process has agents, and this is none of them."""
        if self._agents is not None and agent not in self._agents:
            raise AgentNotFound(f"No agent named {quoted(agent)!r} is known here.", agent=agent)
        return self.limits(agent)

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        """Start the driver of a new session; False when it is started, or taken up, later."""
        state = self._first_state(session, session.token_hash, [ref])
        return await self._send(session.session_id, self._start(state, session)) and not self._driver.starts_wait

    async def start_run(self, session: NewSession) -> bool:
        """Start the workflow of a new run; False when it is started later."""
        return await self._send(session.session_id, self._start_run(session))

    async def _start_run(self, session: NewSession | SessionRow) -> None:
        await self._driver.start_run(session)
        await end_if_deleted(self._store, self._driver, session.session_id)

    async def start_with_turns(self, row: SessionRow) -> bool:
        """Start the driver of a new fork or import, which has turns already; False when it has to be started later."""
        return await self._send(row.session_id, self._start(await self._state_with_turns(row), row))

    async def cancel(self, request: CancelRequest) -> bool:
        """Signal a cancel request, which the store has already; False when it has to be signalled later."""
        turn_id = names.turn_id(request.turn)
        sent = await self._send(request.session_id, self._driver.cancel(request.session_id, turn_id, request.until))
        return sent and request.session_id not in self._driver.unserved

    async def describe(self, session_id: str) -> DriverView | None:
        """Query the session's driver and compare it with the store; None when the driver does not answer.

        When the store or Temporal was restored from a backup, one of them is older. A driver that takes unread
        deliveries for done would then be signalled again and again.
        """
        before = await self._store.session(session_id)
        view = await self._driver.describe(session_id)
        if before is None or view is None:
            return view
        now = await self._store.session(session_id)
        if now is None or now.ended:
            return view
        if view.head is not None and now.events < view.head:
            message = f"The store has {now.events} events of this session, which has had {view.head}."
            await set_attention(self._store, session_id, Attention(code=StoreBehind.code, message=message))
        elif view.is_behind(before.turns) or await self._is_dropped(session_id, view):
            log.warning("the driver of session %s is older than the store; it reads the store again", session_id)
            await self._driver.repair(session_id, "rebuild", "DRIVER_BEHIND")
        return view

    async def _is_dropped(self, session_id: str, view: DriverView) -> bool:
        """Whether the driver takes a delivery for done that no turn has read."""
        dropped = view.dropped
        return bool(dropped) and any(each.delivery_id in dropped for each in await self._store.unread(session_id))

    @property
    def unserved(self) -> Mapping[str, str]:
        """The sessions that wait for a worker of their build, with this build."""
        return self._driver.unserved

    async def find_unserved(self) -> None:
        await self._driver.find_unserved()

    async def attend_unserved(self, session_id: str) -> None:
        """Emit that a session with an unread delivery waits for a worker of its build."""
        build = self._driver.unserved[session_id]
        await set_attention(self._store, session_id, Attention(code=BuildGone.code, message=BuildGone.of(build)))

    async def signal_all(self, session_id: str, signalled: set[str] | None = None) -> None:
        """Signal everything that the session's driver may not know, in order; start a driver if there is none.

        `signalled`: the ids of deliveries to skip. The ids of those that are signalled now are added.
        """
        row = await self._store.session(session_id)
        if row is None:
            return
        if not row.ended:
            try:
                await self._send_all(row, set() if signalled is None else signalled)
            except NoDriver:
                await start_lost_driver(self._store, self._driver, row)
        if row.unsignalled:
            # After the signals, so that later deliveries cannot overtake them. A mark added meanwhile stays.
            await self._store.clear_unsignalled(session_id, row.unsignalled)

    async def _send(self, session_id: str, sending: Awaitable[None]) -> bool:
        began = monotonic()
        in_flight = self._in_flight.setdefault(session_id, [])
        in_flight.append(began)
        try:
            await sending
        except NoDriver:
            return await self.deliver_all(session_id)
        except Exception as error:
            await self._mark(session_id, error)
            return False
        finally:
            in_flight.remove(began)
            if not in_flight:
                self._in_flight.pop(session_id, None)
        return True

    def _is_slow(self, session_id: str) -> bool:
        in_flight = self._in_flight.get(session_id)
        return bool(in_flight) and monotonic() - in_flight[0] > _SLOW_SECONDS

    async def deliver_all(self, session_id: str) -> bool:
        """Signal everything that the session's driver may not know; False when it has to be signalled later."""
        try:
            # The time limit is that of one call, however many signals there are.
            await in_time(self.signal_all(session_id))
        except Exception as error:
            await self._mark(session_id, error)
            return False
        return True

    async def _mark(self, session_id: str, error: Exception) -> None:
        """Mark the session as not fully signalled. It never raises: the delivery stays accepted."""
        fault = None if isinstance(error, Unavailable | TimeoutError) else error
        log.warning("deliveries to session %s are signalled later", session_id, exc_info=fault)
        try:
            await self._store.mark_unsignalled(session_id)
        except Exception:
            # The sweeper finds the deliveries also without the mark; only their order may differ then.
            log.warning("session %s could not be marked", session_id, exc_info=True)

    async def _send_all(self, row: SessionRow, signalled: set[str]) -> None:
        token_hash = await self._store.token_of(row.session_id) or ""
        waiting = await self._store.unread(row.session_id)
        if row.run is not None and row.status == "starting":
            await self._start_run(row)
        elif row.status == "starting":
            refs = [reference(each, token_hash) for each in waiting]
            await self._start(self._first_state(row, token_hash, refs), row)
            if not waiting:
                # Else the sweeper would look at it for ever.
                await self._store.begin_waiting(row.session_id)
        elif row.is_new_fork:
            # Nothing happens if its driver runs.
            await self._start(await self._state_with_turns(row), row)
        for each in waiting:
            if each.delivery_id not in signalled:
                await self._driver.deliver(row.session_id, reference(each, token_hash))
                signalled.add(each.delivery_id)
        # Read again, after what waits: what it meant may have been replaced meanwhile, and is gone then.
        now = None if row.cancel_turn is None else await self._store.session(row.session_id)
        if now is not None and now.cancel_turn is not None:
            await self._driver.cancel(row.session_id, names.turn_id(now.cancel_turn), now.cancel_until)

    def _first_state(
        self, session: NewSession | SessionRow, token_hash: str, waiting: Sequence[JsonObject]
    ) -> SessionState:
        agent = self._agents.get(session.agent) if self._agents else None
        state = SessionState(
            session_id=session.session_id,
            agent=session.agent,
            # The Temporal UI shows it until the first model call.
            model=(agent.model or DEMO) if agent else None,
            mode=session.mode,
            capabilities=session.capabilities,
            token_hash=token_hash,
            bounds=session.bounds,
            turns=agent.turns if agent else None,
            parent=parent_ref(session.parent),
            calls_back=isinstance(session, NewSession) and session.callback is not None,
        )
        for ref in waiting:
            # A delivery of a newer build may be unreadable here. It is signalled as well, to a driver that can read it.
            if (delivery := read_delivery(ref)) is not None:
                state = state.with_delivery(delivery)
        return state

    async def _state_with_turns(self, row: SessionRow) -> SessionState:
        """The state that a rebuild would find: all turns so far are shared ones, and nothing waits."""
        state = self._first_state(row, await self._store.token_of(row.session_id) or "", [])
        return state.model_copy(update={"turn": row.turns, "told": row.turns, "head": row.events})

    async def _start(self, state: SessionState, of: NewSession | SessionRow) -> None:
        summary = f"{state.agent}: {of.title}" if self._ui_detail and of.title else state.agent
        await self._driver.start(state, summary=summary, lane_of=of.lane_of)
        await end_if_deleted(self._store, self._driver, state.session_id)


@dataclass(frozen=True)
class Cancelled:
    status: Literal["accepted", "no_active_turn"]
    # The signal has failed for now. The turn stops all the same: every step checks the store.
    delayed: bool = False


async def cancel_turn(store: Store, signals: Signals, session_id: str, turn_id: str | None) -> Cancelled:
    """Record a cancel request for the session's turn, if it has one, then signal the driver, so that it stops at once.

    With `turn_id`, only that turn is stopped. Idempotent.
    """
    request = await store.cancel(session_id, turn_id, cancel_requested)
    if request is None:
        return Cancelled("no_active_turn")
    return Cancelled("accepted", delayed=not await signals.cancel(request))
