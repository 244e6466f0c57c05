"""Tells sessions of answers that nobody has told them of: whoever counted them died, or found Temporal away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from time import monotonic

from perdure.errors import NoActiveSession, SessionGone, Unavailable
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import DeliveryRow, Store

from .asked import reference
from .driver import Driver

log = logging.getLogger("perdure.sessions")

_LONGEST = 3600.0


class Sweeper:
    """Signals unheard answers again. Any number may run at once: a driver hears an id once."""

    def __init__(
        self,
        store: Store,
        driver: Driver,
        *,
        every: float = 5.0,
        older_than: float = 5.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._driver = driver
        self._every = every
        self._older_than = older_than
        self._clock = clock
        # When each is signalled again, and how long to wait after that. Each signal is kept in the session's history,
        # so a session whose workers are away for days must not be told every few seconds.
        self._pauses: dict[str, tuple[float, float]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sweep now and then, for as long as this is open."""
        sweeping = asyncio.create_task(self._run())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait((sweeping,))

    async def _run(self) -> None:
        while True:
            # Not all at the same moment.
            await asyncio.sleep(self._every * random.uniform(0.8, 1.2))
            try:
                await self.sweep()
            except Unavailable as away:
                log.warning("unheard answers will be looked for again: %s", away.message)
            except Exception:
                # A fault of ours, or of one session: it must not end the sweep of all others for good.
                log.exception("the sweep failed; it will be tried again")

    async def sweep(self) -> None:
        """Look once; stop at the first sign that Temporal is away."""
        rows = await self._store.unheard(kind="answer", older_than=self._older_than)
        found = {row.delivery_id for row in rows}
        self._pauses = {each: pause for each, pause in self._pauses.items() if each in found}
        for row in rows:
            if self._due(row.delivery_id):
                await self._signal(row)

    def _due(self, delivery_id: str) -> bool:
        now = self._clock()
        due, pause = self._pauses.get(delivery_id, (now, self._every))
        if now < due:
            return False
        self._pauses[delivery_id] = (now + pause, min(_LONGEST, pause * 2))
        return True

    async def _signal(self, row: DeliveryRow) -> None:
        log.info("the answer %s was not heard yet; its session is told again", row.delivery_id)
        try:
            await self._driver.deliver(row.session_id, reference(row))
        except NoActiveSession:
            await self._refuse(row)
        except Unavailable:
            self._pauses.pop(row.delivery_id)
            raise

    async def _refuse(self, row: DeliveryRow) -> None:
        """Its workflow is gone: say so, or it would be tried for ever."""
        data = {"deliveryId": row.delivery_id, "code": NoActiveSession.wire_code, "message": NoActiveSession().message}
        event = NewEvent(
            type=EventType.DELIVERY_REFUSED,
            key=names.session_key(f"refused/{row.delivery_id}"),
            data=data,
            delivery_ids=(row.delivery_id,),
        )
        try:
            await self._store.refuse(row.session_id, row.delivery_id, NoActiveSession.wire_code, event)
        except SessionGone:
            return
