"""Forks: where a session can be forked, and new sessions that share its first turns."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from perdure.errors import ForkRefused, Invalid, SessionNotFound
from perdure.protocol.deliveries import Principal
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.values import NewDelivery, NewFork, SessionRow

from . import deliveries
from .signals import Signals

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
        session_id = deliveries.session_id()
        delivery = _key_holder(session_id, parent.session_id, turn, step, principal, idempotency_key)
        first = await self._store.first(delivery) if delivery else None
        if first is None:
            await self._check_boundary(parent, turn, step)
            token_hash = hash_token(derive_token(self._secret, session_id))
            forked = await self._store.fork(NewFork(session_id, token_hash, parent.session_id, turn, delivery))
            session_id, fresh = forked.session_id, forked.fresh
        else:
            session_id, fresh = first.delivery.session_id, False
        row = await self._store.session(session_id)
        if row is None:
            raise SessionNotFound
        started = not row.is_new_fork or await self._signals.start_fork(row)
        return ForkReceipt(
            session_id=session_id,
            continuation_token=derive_token(self._secret, session_id),
            parent=parent.session_id,
            turn=turn,
            deduplicated=not fresh,
            delayed=not started,
        )

    async def _check_boundary(self, parent: SessionRow, turn: int, step: int | None) -> None:
        """`ForkRefused` when the session cannot be forked there, with the next earlier turn where it can."""
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
        # Imported late: an API loads the libraries of models only when it needs them.
        from perdure.harness.journal import read_journal

        if turn >= parent.turns:
            return "turn_not_begun", f"Turn {turn} has not begun; the session has {parent.turns} turns."
        journal = await read_journal(self._store, parent.session_id, turn)
        if journal.end_record is None:
            return "turn_not_ended", f"Turn {turn} has not ended."
        if journal.park is not None:
            # What people have answered is recorded with the turn that asked, and the effects of later turns with it.
            return "turn_parked", f"Turn {turn} waited for people; the turn that continues it is a boundary."
        if step is not None and step != journal.last_step:
            # The values of slots are recorded by turn.
            return "inside_turn", f"Only the last step of turn {turn}, {journal.last_step}, is a boundary."
        return None


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
