"""Sessions behind names that callers choose: `agent/{name}/{instance}`, one for each caller."""

import json
from dataclasses import dataclass
from typing import Protocol

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, Principal, QueueMode, Receipt
from perdure.protocol.dispatch import check_names
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.values import Instance, SessionRow


class DeliverOrStart(Protocol):
    """`Sessions.deliver_or_start`."""

    async def __call__(
        self,
        token: str,
        agent: str,
        *,
        body: DeliveryBody,
        principal: Principal,
        idempotency_key: str | None,
        queue_mode: QueueMode | None,
    ) -> Receipt: ...


@dataclass(frozen=True)
class Named:
    """One of the sessions behind a name, which are numbered from 0 in the order in which they came."""

    number: int
    row: SessionRow


@dataclass(frozen=True)
class Admission:
    """An accepted prompt, the number of its session, and the index there from which its events are read."""

    receipt: Receipt
    delivery_id: str
    number: int
    start: int


class Instances:
    """Resumes or starts the session of a name. Many callers at once: one session for each of them."""

    def __init__(self, store: Store, secret: bytes, deliver_or_start: DeliverOrStart) -> None:
        self._store = store
        self._secret = secret
        self._deliver_or_start = deliver_or_start

    def target(self, agent: str, to: str, principal: Principal) -> str:
        """What the caller dispatches to: a session by its id, or the instance of the agent with this name."""
        check_names(to, None)
        return to if to.startswith(names.SESSION_ID) else self.token(agent, to, principal)

    def name(self, agent: str, instance: str, principal: Principal) -> str:
        """What the store knows the caller's name by."""
        return hash_token(self.token(agent, instance, principal))

    async def find(self, name: str) -> Named | None:
        """The newest session of a name, also when it has ended; None before the first prompt, and when it is deleted.

        A prompt resumes it, or starts its successor.
        """
        newest = await self._store.instance(name)
        found = None if newest is None else await self._row(newest)
        if found is not None and not found.row.ended:
            return found
        current = await self._store.route(name)
        if current is None or (newest is not None and newest.session_id == current):
            return found
        # An older build has started it.
        await self._store.name_session(name, current)
        newest = await self._store.instance(name)
        return None if newest is None else await self._row(newest)

    async def after(self, name: str, number: int) -> Named | None:
        """The session of this number, or the first one after it that was not deleted."""
        found = await self._store.instance(name, number)
        while found is not None:
            if (named := await self._row(found)) is not None:
                return named
            found = await self._store.instance(name, found.number + 1)
        return None

    async def prompt(
        self,
        agent: str,
        instance: str,
        body: DeliveryBody,
        principal: Principal,
        idempotency_key: str | None,
        queue_mode: QueueMode | None = None,
    ) -> Admission:
        """Deliver to the session of the name, or start it. A repeated request gets its first receipt."""
        # Before anything is accepted: all events of this prompt come later.
        before = await self.find(self.name(agent, instance, principal))
        receipt = await self._deliver_or_start(
            self.token(agent, instance, principal),
            agent,
            body=body,
            principal=principal,
            idempotency_key=idempotency_key,
            queue_mode=queue_mode,
        )
        delivery_id = receipt.delivery_id
        assert delivery_id is not None
        number = await self._store.number_of(receipt.session_id) or 0
        if receipt.deduplicated:
            return Admission(receipt, delivery_id, number, await self._start_of(receipt.session_id, delivery_id))
        # Another request may have started the session meanwhile, so what was before is of no use.
        known = before is not None and before.row.session_id == receipt.session_id
        return Admission(receipt, delivery_id, number, before.row.events if before is not None and known else 0)

    async def _row(self, found: Instance) -> Named | None:
        row = None if found.session_id is None else await self._store.session(found.session_id)
        return None if row is None else Named(found.number, row)

    async def _start_of(self, session_id: str, delivery_id: str) -> int:
        """Where the events of an accepted delivery begin: with its turn, or its refusal, or at the end if neither is.

        The end is what it was before the delivery was looked at: its turn may begin right after that.
        """
        session = await self._store.session(session_id)
        rows = await self._store.deliveries(session_id, [delivery_id])
        if session is None or not rows:
            return 0
        if rows[0].unread:
            return session.events
        turn = rows[0].turn
        key = names.session_key(f"refused/{delivery_id}") if turn is None else names.turn_key(turn, "started")
        return await self._store.index_of(session_id, key) or 0

    def token(self, agent: str, instance: str, principal: Principal) -> str:
        """The token of the session behind the caller's name."""
        # Of the owner too: a name that two callers choose means two sessions. As JSON, so that no two names are alike.
        return derive_token(self._secret, json.dumps(["agent", agent, instance, principal.owner]))
