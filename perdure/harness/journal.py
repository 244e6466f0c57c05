"""What the harness writes into the journal, and how it reads it back. Nobody else parses these bodies."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody
from perdure.protocol.events import FinishReason, Usage
from perdure.protocol.principals import Principal
from perdure.protocol.requests import CallRef, Calls, Failure, Finished, ToolOutcome
from perdure.protocol.wire import JsonObject, Wire
from perdure.store.base import NewRecord

DELIVERY = "perdure/delivery/1"
REPLY = "pydantic-ai/2"
FAILURE = "perdure/failure/1"
INTENT = "perdure/intent/1"
OUTCOME = "perdure/outcome/1"

#: Where a turn that failed outside its model call says so.
END = "end"

OutcomeStatus: TypeAlias = Literal["completed", "failed", "rejected", "unknown"]
W = TypeVar("W", bound=Wire)


class HeardDelivery(DeliveryBody):
    """A delivery, in the journal of the turn that heard it."""

    delivery_id: str


class AskedCall(Wire):
    """A call as the model asked for it. `ref` is absent when it could not be made."""

    call_id: str
    tool: str
    input: JsonObject
    ref: CallRef | None = None


class StoredReply(Wire):
    """The model's answer in its own library's form, and what the harness made of it."""

    response: JsonObject
    finish_reason: FinishReason
    usage: Usage
    calls: tuple[AskedCall, ...] = ()

    @property
    def asks(self) -> bool:
        return bool(self.calls)


class StoredFailure(Wire):
    """The end of a turn that failed."""

    failure: Failure
    usage: Usage = Usage()


class Intent(Wire):
    """An attempt that is about to have its effect."""

    tool: str
    attempt: int
    generation: int


class Outcome(Wire):
    """What a call came to."""

    status: OutcomeStatus
    output: Any = None
    is_error: bool = False
    error: JsonObject | None = None
    token_hash: str | None = None


def written(turn: int, step: int, slot: str, form: str, body: Wire) -> NewRecord:
    return NewRecord(turn=turn, step=step, slot=slot, format=form, body=body.model_dump(mode="json"))


def read(record: NewRecord, form: str, shape: type[W]) -> W:
    if record.format != form:
        raise UnreadableState(f"The record {record.slot!r} has the format {record.format!r}; {form!r} was expected.")
    try:
        return shape.model_validate(record.body)
    except ValidationError as invalid:
        raise UnreadableState(f"The record {record.slot!r} cannot be read.", problems=invalid.error_count()) from None


def dump_response(response: ModelResponse) -> JsonObject:
    return ModelMessagesTypeAdapter.dump_python([response], mode="json")[0]


_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)


def load_response(reply: StoredReply) -> ModelResponse:
    return _RESPONSE.validate_python(reply.response)


def model_outcome(record: NewRecord) -> Calls | Finished:
    """What a recorded reply, or its failure, means to the turn."""
    if record.format == FAILURE:
        failed = read(record, FAILURE, StoredFailure)
        return Finished(usage=failed.usage, failure=failed.failure)
    reply = read(record, REPLY, StoredReply)
    if reply.asks:
        return Calls(calls=tuple(call.ref for call in reply.calls if call.ref), usage=reply.usage)
    return Finished(usage=reply.usage)


def tool_outcome(call_id: str, record: NewRecord) -> ToolOutcome:
    outcome = read(record, OUTCOME, Outcome)
    return ToolOutcome(call_id=call_id, status=outcome.status, token_hash=outcome.token_hash)


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
        """Whoever spoke last to this turn."""
        return next((heard.principal for heard in reversed(self.heard()) if heard.principal), None)

    def reply(self, step: int) -> StoredReply | None:
        record = self.at(step, names.REPLY)
        return read(record, REPLY, StoredReply) if record and record.format == REPLY else None

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
        failed = next((record for record in self.records if record.format == FAILURE), None)
        if failed is not None:
            return failed
        last = self.reply(self.last_step)
        return self.at(self.last_step, names.REPLY) if last and not last.asks else None

    def plus(self, records: Sequence[NewRecord]) -> "TurnJournal":
        return TurnJournal([*self.records, *records])
