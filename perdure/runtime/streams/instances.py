"""Sessions behind names that callers choose: `agent/{name}/{instance}`, one for each caller."""

import json
from dataclasses import dataclass
from typing import Protocol

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, Principal, Receipt
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.values import SessionRow


class DeliverOrStart(Protocol):
    """`Sessions.deliver_or_start`."""

    async def __call__(
        self, token: str, agent: str, *, body: DeliveryBody, principal: Principal, idempotency_key: str | None
    ) -> Receipt: ...


@dataclass(frozen=True)
class Admission:
    """An accepted prompt, and the index from which its events are read."""

    receipt: Receipt
    delivery_id: str
    start: int


class Instances:
    """Resumes or starts the session of a name. Many callers at once: one session for each of them."""

    def __init__(self, store: Store, secret: bytes, deliver_or_start: DeliverOrStart) -> None:
        self._store = store
        self._secret = secret
        self._deliver_or_start = deliver_or_start

    async def find(self, agent: str, instance: str, principal: Principal) -> SessionRow | None:
        """The session of the caller's name; None before its first prompt, and after it has ended."""
        session_id = await self._store.route(hash_token(self._token(agent, instance, principal)))
        return None if session_id is None else await self._store.session(session_id)

    async def prompt(
        self, agent: str, instance: str, body: DeliveryBody, principal: Principal, idempotency_key: str | None
    ) -> Admission:
        """Deliver to the session of the name, or start it. A repeated request gets its first receipt."""
        # Before anything is accepted: all events of this prompt come later.
        before = await self.find(agent, instance, principal)
        receipt = await self._deliver_or_start(
            self._token(agent, instance, principal),
            agent,
            body=body,
            principal=principal,
            idempotency_key=idempotency_key,
        )
        delivery_id = receipt.delivery_id
        assert delivery_id is not None
        if receipt.deduplicated:
            return Admission(receipt, delivery_id, await self._start_of(receipt.session_id, delivery_id))
        # Another request may have started the session meanwhile, so what was before is of no use.
        known = before is not None and before.session_id == receipt.session_id
        return Admission(receipt, delivery_id, before.events if before is not None and known else 0)

    async def _start_of(self, session_id: str, delivery_id: str) -> int:
        """Where the events of an accepted delivery begin: with its turn, or at the end if none has read it."""
        rows = await self._store.deliveries(session_id, [delivery_id])
        turn = rows[0].turn if rows else None
        if turn is None:
            row = await self._store.session(session_id)
            return 0 if row is None else row.events
        return await self._store.index_of(session_id, names.turn_key(turn, "started")) or 0

    def _token(self, agent: str, instance: str, principal: Principal) -> str:
        # Of the owner too: a name that two callers choose means two sessions. As JSON, so that no two names are alike.
        return derive_token(self._secret, json.dumps(["agent", agent, instance, principal.owner]))
