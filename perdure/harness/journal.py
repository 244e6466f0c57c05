"""The records of a turn: their formats, and how they are read."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody
from perdure.protocol.events import FinishReason, Usage
from perdure.protocol.inputs import InputRequest, OpenInput
from perdure.protocol.principals import Principal
from perdure.protocol.requests import CallRef, Calls, Failure, Finished, ModelOutcome, Parked, Resumed, ToolOutcome
from perdure.protocol.wire import DEEPEST, JsonObject, Wire, deeper_than
from perdure.store.values import NewRecord
from perdure.text import quoted, whole

DELIVERY = "perdure/delivery/1"
REPLY = "pydantic-ai/2"
FAILURE = "perdure/failure/1"
INTENT = "perdure/intent/1"
OUTCOME = "perdure/outcome/1"
PARK = "perdure/park/1"
RESUMPTION = "perdure/resumption/1"
MARK = "perdure/mark/1"

#: Where a turn that ended outside its model call says so: it failed, was cancelled, or parked.
END = "end"
#: Where a parked turn says that it was cancelled.
CANCELLED_SLOT = "cancelled"
#: Where a turn says what it made of people's answers; in step 0.
RESUME = "resume"

_LONGEST_MODEL = 200

OutcomeStatus: TypeAlias = Literal["completed", "failed", "rejected", "unknown"]
W = TypeVar("W", bound=Wire)


class HeardDelivery(DeliveryBody):
    """A delivery, in the journal of the turn that heard it."""

    delivery_id: str

    @property
    def speaks(self) -> bool:
        return self.kind == "message" or self.message is not None


class Ask(Wire):
    """What a call waits for. Times are seconds since the epoch."""

    request: InputRequest
    expires_at: float | None = None
    remind_at: tuple[float, ...] = ()

    @property
    def open(self) -> OpenInput:
        return OpenInput(request_id=self.request.request_id, expires_at=self.expires_at, remind_at=self.remind_at)


class AskedCall(Wire):
    """A call as the model asked for it. `ref` is absent when it cannot be made; with `ask` it waits for people."""

    call_id: str
    tool: str
    input: JsonObject
    ref: CallRef | None = None
    ask: Ask | None = None

    @property
    def runs(self) -> bool:
        """Whether the call is run without asking anybody."""
        return self.ref is not None and self.ask is None


class Result(Wire):
    """A structured result that was checked against its schema."""

    value: Any


class StoredReply(Wire):
    """The model's answer in its own library's form, and what the harness made of it."""

    response: JsonObject
    finish_reason: FinishReason
    usage: Usage
    calls: tuple[AskedCall, ...] = ()
    # How many of them run at the same time; None: recorded before there was a limit.
    parallel: int | None = None
    # The turn parked with this very reply.
    parked: bool = False
    # The turn's result; it counts once the calls have ended.
    result: Result | None = None
    # What the turn ended with, though the model had answered.
    failure: Failure | None = None
    # Whom the model has listened to, and its calls with it. Replies of older builds do not say it.
    speaker: Principal | None = None

    @property
    def ends(self) -> bool:
        return not self.calls or self.parked or self.failure is not None

    @property
    def asks(self) -> tuple[Ask, ...]:
        return tuple(call.ask for call in self.calls if call.ask)

    @property
    def open(self) -> tuple[OpenInput, ...]:
        return tuple(ask.open for ask in self.asks)

    def call(self, call_id: str) -> AskedCall:
        for call in self.calls:
            if call.call_id == call_id:
                return call
        raise UnreadableState(f"The records of this step do not ask for the call {call_id!r}.")


class StoredFailure(Wire):
    """The end of a turn that failed."""

    failure: Failure
    usage: Usage = Usage()


class StoredPark(Wire):
    """The end of a turn that waits for people."""

    open: tuple[OpenInput, ...]


class StoredResumption(Wire):
    """What a turn made of people's answers, and what it goes on with from the turn that asked."""

    resumed: Resumed
    # Told to the model.
    notes: tuple[str, ...] = ()
    # Whoever the asking turn listened to: to approve is not to speak.
    speaker: Principal | None = None
    output_schema: JsonObject | None = None


class StoredMark(Wire):
    """What notes to the model are marked with, in this turn and all that follow. Nobody outside knows it."""

    mark: str


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


#: A reply holds arguments of calls, which may be as deep as values may be, in a few levels of its own.
_DEEPEST_REPLY = DEEPEST + 50

_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)


def readable(response: ModelResponse) -> ModelResponse:
    """The response as it can be kept, sent and read again; raises when nothing of that can be made of it."""
    dumped = dump_response(response)
    if deeper_than(dumped, _DEEPEST_REPLY):
        # By itself it might just be written; among the other messages of a prompt it would not be.
        raise ValueError(f"The reply is nested deeper than {_DEEPEST_REPLY} levels.")
    return _RESPONSE.validate_python(_readable(dumped))


def _readable(value: Any) -> Any:
    match value:
        case str():
            return whole(value)
        case float():
            return value if isfinite(value) else None
        case dict():
            known = cast("dict[str, Any]", value)
            return {whole(name): _readable(inner) for name, inner in known.items()}
        case list():
            return [_readable(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def load_response(reply: StoredReply) -> ModelResponse:
    # An older build may have kept what no provider takes back.
    return _RESPONSE.validate_python(_readable(reply.response))


def model_outcome(record: NewRecord) -> ModelOutcome:
    """What a recorded reply, or whatever else has ended the turn, means to the turn."""
    if record.format == FAILURE:
        failed = read(record, FAILURE, StoredFailure)
        return Finished(usage=failed.usage, failure=failed.failure)
    if record.format == PARK:
        return Parked(open=read(record, PARK, StoredPark).open)
    if record.format == RESUMPTION:
        return Finished(failure=read(record, RESUMPTION, StoredResumption).resumed.failure)
    return _of_reply(read(record, REPLY, StoredReply))


def _of_reply(reply: StoredReply) -> ModelOutcome:
    model = _model(reply)
    if reply.parked:
        return Parked(open=reply.open, usage=reply.usage, model=model)
    if reply.ends:
        return Finished(usage=reply.usage, failure=reply.failure, model=model)
    calls = tuple(call.ref for call in reply.calls if call.ref and call.runs)
    return Calls(calls=calls, parallel=reply.parallel, open=reply.open, usage=reply.usage, model=model)


def _model(reply: StoredReply) -> str | None:
    """The name that the provider gave itself, which goes into histories of Temporal: those have limits."""
    name = reply.response.get("model_name")
    return quoted(name, _LONGEST_MODEL) if isinstance(name, str) and name else None


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
