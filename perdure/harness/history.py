"""Finished turns as messages, kept between steps: a finished turn never changes, so each is parsed once."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pydantic_ai.messages import ModelMessage

from perdure.store.base import Store
from perdure.store.engine.rows import encode
from perdure.store.values import Record

from .prompt import messages_of
from .turn_journal import TurnJournal


@dataclass(frozen=True)
class Past:
    """The turns before the current one."""

    #: The first turn that is not in it.
    until: int = 0
    messages: tuple[ModelMessage, ...] = ()
    call_ids: frozenset[str] = frozenset()
    weight: int = 0
    #: What notes to the model are marked with, from some turn on.
    mark: str | None = None


class Histories:
    """The pasts of the sessions that this process has served lately, up to a weight in bytes."""

    def __init__(self, store: Store, *, capacity: int = 64 * 1024 * 1024) -> None:
        self._store = store
        self._capacity = capacity
        self._weight = 0
        self._pasts: OrderedDict[str, Past] = OrderedDict()

    async def load(self, session_id: str, turn: int) -> tuple[Past, TurnJournal]:
        """The past of a turn and its own records; only what this process has not seen yet is read."""
        past = self._pasts.get(session_id, Past())
        if past.until > turn:
            # An attempt at an older turn, of which nothing may be known from later ones.
            past = Past()
        records = await self._store.records(session_id, from_turn=past.until, to_turn=turn)
        earlier = [record for record in records if record.turn < turn]
        if past.until < turn:
            past = self._keep(session_id, _extended(past, earlier, turn))
        return past, TurnJournal([record for record in records if record.turn == turn])

    def _keep(self, session_id: str, past: Past) -> Past:
        known = self._pasts.pop(session_id, None)
        self._weight -= known.weight if known else 0
        if past.weight > self._capacity:
            # It would drive out all the others, and then itself.
            return past
        self._pasts[session_id] = past
        self._weight += past.weight
        while self._weight > self._capacity:
            self._weight -= self._pasts.popitem(last=False)[1].weight
        return past


def _extended(past: Past, records: Sequence[Record], until: int) -> Past:
    messages = list(past.messages)
    call_ids = set(past.call_ids)
    weight, mark = past.weight, past.mark
    for _, group in groupby(records, key=lambda record: record.turn):
        turn = TurnJournal(list(group))
        # Turns before there was a mark stay as the model has read them.
        mark = mark or turn.mark
        messages.extend(messages_of(turn, mark))
        call_ids.update(call_ids_of(turn))
        weight += sum(len(encode(record.body)) for record in turn.records)
    return Past(until=until, messages=tuple(messages), call_ids=frozenset(call_ids), weight=weight, mark=mark)


def call_ids_of(turn: TurnJournal) -> set[str]:
    return {call.call_id for reply in turn.replies() for call in reply.calls}
