"""Turns that failed: listing them, and delivering their messages again once the cause is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perdure.errors import Conflict, DeadLetterNotFound, NoActiveSession, SessionGone
from perdure.protocol import names
from perdure.protocol.deliveries import CONTROLS, DeliveryBody, Principal
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.lifecycle import DeadLetterPage, DeadLetterQuery

from .deliveries import CallerRequest

if TYPE_CHECKING:
    from .signals import Signals

_NEWEST = DeadLetterQuery()

#: The owner of the idempotency keys: whoever requeues a turn, it is requeued once.
_KEYS = "perdure/dead-letters"


@dataclass(frozen=True)
class Requeued:
    """The deliveries that carry the messages of a failed turn, in their order."""

    delivery_ids: Sequence[str]
    # The turn had been requeued before, so nothing was delivered now.
    deduplicated: bool = False
    # A signal has failed for now, and is repeated later.
    delayed: bool = False


class DeadLetters:
    def __init__(self, store: Store, signals: Signals) -> None:
        self._store = store
        self._signals = signals

    async def list(self, query: DeadLetterQuery = _NEWEST) -> DeadLetterPage:
        """One page of failed turns, newest first."""
        return await self._store.dead_letters(query)

    async def requeue(self, session_id: str, turn: int, principal: Principal | None = None) -> Requeued:
        """Deliver the messages of a failed turn to its session again. Repeated calls get the first deliveries.

        `DeadLetterNotFound` when no such turn has failed, or the session is not the principal's; `NoActiveSession` when
        the session has ended.
        """
        row = await self._store.session(session_id)
        letter = await self._store.dead_letter(session_id, turn)
        if row is None or letter is None or (principal is not None and row.principal.owner != principal.owner):
            raise DeadLetterNotFound
        token_hash = await self._store.token_of(session_id) or ""
        accepted: list[Accepted] = []
        for index, message in enumerate(await self._messages(session_id, turn)):
            request = CallerRequest(
                session_id,
                message,
                # The words stay those of their author.
                message.principal or row.principal,
                about=("requeue",),
                idempotency_key=f"{names.turn_workflow(session_id, turn)}/{index}",
                token_hash=token_hash,
                mode="collect",
            )
            accepted.append(await self._accept(replace(request.delivery(), owner=_KEYS)))
        # A crash before this leaves the dead letter open; the next call finds its deliveries by their keys.
        await self._store.mark_requeued(session_id, turn)
        return Requeued(
            [each.delivery.delivery_id for each in accepted],
            deduplicated=not any(each.fresh for each in accepted),
            delayed=not all([await self._signal(each) for each in accepted]),
        )

    async def _accept(self, delivery: NewDelivery) -> Accepted:
        try:
            return await self._store.accept(delivery)
        except SessionGone:
            raise NoActiveSession("The session has ended; start a new one with the message.") from None

    async def _signal(self, accepted: Accepted) -> bool:
        row = accepted.delivery
        return not row.unread or await self._signals.deliver(row, unsignalled=accepted.unsignalled)

    async def _messages(self, session_id: str, turn: int) -> Sequence[DeliveryBody]:
        """The messages of the turn. A turn that resumed after an answer has none: the one that asked has them.

        An answer that came too late has a turn of its own, and the turn before that has ended: its messages were read.
        """
        # Imported late: an API loads the libraries of models only when it needs them.
        from perdure.harness.journal import read_journal

        for number in range(turn, -1, -1):
            journal = await read_journal(self._store, session_id, number)
            has_ended = number < turn and journal.records and journal.park is None
            if has_ended or any(each.kind in CONTROLS for each in journal.deliveries()):
                break
            if messages := [_again(each) for each in journal.deliveries() if each.is_message]:
                return messages
        raise Conflict("No message of this turn is kept, so there is nothing to deliver again.")


def _again(message: DeliveryBody) -> DeliveryBody:
    """The message alone: the requests that it may have answered are closed."""
    fields = set(DeliveryBody.model_fields) - {"kind", "input_responses", "answers"}
    return DeliveryBody.model_validate(message.model_dump(include=fields))
