"""The records of one turn, by what they are."""

from collections.abc import Sequence

from perdure.protocol import names
from perdure.protocol.principals import Principal
from perdure.protocol.requests import Parked
from perdure.protocol.wire import JsonObject
from perdure.store.values import NewRecord

from .journal import (
    DELIVERY,
    FAILURE,
    MARK,
    OUTCOME,
    PARK,
    REPLY,
    RESUME,
    RESUMPTION,
    HeardDelivery,
    Outcome,
    StoredMark,
    StoredReply,
    StoredResumption,
    model_outcome,
    read,
)


class TurnJournal:
    """The records of one turn, by what they are."""

    def __init__(self, records: Sequence[NewRecord]) -> None:
        self.records = tuple(records)
        self._by_key = {(record.step, record.slot): record for record in records}

    def at(self, step: int, slot: str) -> NewRecord | None:
        return self._by_key.get((step, slot))

    def heard(self) -> tuple[HeardDelivery, ...]:
        count = sum(1 for step, slot in self._by_key if step == 0 and slot.startswith("delivery/"))
        return tuple(
            read(self._by_key[0, names.delivery_slot(index)], DELIVERY, HeardDelivery) for index in range(count)
        )

    @property
    def principal(self) -> Principal | None:
        """Whoever spoke last to this turn; an answer alone is no speech."""
        spoken = (heard.principal for heard in reversed(self.heard()) if heard.speaks and heard.principal)
        return next(spoken, self.resumption.speaker if self.resumption else None)

    @property
    def mark(self) -> str | None:
        """What notes are marked with, if this is the first turn in which they are."""
        record = self.at(0, names.MARK)
        return read(record, MARK, StoredMark).mark if record else None

    @property
    def output_schema(self) -> JsonObject | None:
        """What was asked of this turn's result, by its deliveries or by the turn that it goes on with."""
        asked = (heard.output_schema for heard in reversed(self.heard()) if heard.output_schema is not None)
        return next(asked, self.resumption.output_schema if self.resumption else None)

    @property
    def resumption(self) -> StoredResumption | None:
        """What the turn made of people's answers, if it has begun with that."""
        record = self.at(0, RESUME)
        return read(record, RESUMPTION, StoredResumption) if record and record.format == RESUMPTION else None

    def reply(self, step: int) -> StoredReply | None:
        record = self.at(step, names.REPLY)
        return read(record, REPLY, StoredReply) if record and record.format == REPLY else None

    def replies(self) -> tuple[StoredReply, ...]:
        found = (self.reply(step) for step in range(self.last_step + 1))
        return tuple(reply for reply in found if reply)

    def outcome(self, step: int, call_id: str) -> Outcome | None:
        record = self.at(step, names.outcome_slot(call_id))
        return read(record, OUTCOME, Outcome) if record else None

    def interrupted(self, step: int, call_id: str) -> bool:
        """Whether somebody was about to run the call, and never said how it went."""
        return self.at(step, names.intent_slot(call_id)) is not None

    @property
    def last_step(self) -> int:
        return max((record.step for record in self.records), default=0)

    @property
    def over(self) -> NewRecord | None:
        """The record that ended the turn."""
        if self.failed:
            return self.failed
        if self.resumption and self.resumption.resumed.failure:
            return self.at(0, RESUME)
        if park := next((record for record in self.records if record.format == PARK), None):
            return park
        last = self.reply(self.last_step)
        return self.at(self.last_step, names.REPLY) if last and last.ends else None

    @property
    def failed(self) -> NewRecord | None:
        """The record of a failure or a cancellation."""
        return next((record for record in self.records if record.format == FAILURE), None)

    @property
    def parked(self) -> bool:
        """Whether the turn ended to wait for people, and nothing has happened to it since."""
        over = self.over
        return over is not None and isinstance(model_outcome(over), Parked)

    def plus(self, records: Sequence[NewRecord]) -> "TurnJournal":
        return TurnJournal([*self.records, *records])
