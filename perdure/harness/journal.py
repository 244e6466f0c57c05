"""The records of a session: how a step finds its session and agent, and what its turn has recorded."""

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse

from perdure.agents.agent import Agent
from perdure.agents.context import SessionView
from perdure.agents.registry import AgentRegistry
from perdure.bounds import DEEPEST, deeper_than, quoted, repaired
from perdure.errors import AgentGone, SessionGone, StoreBehind, UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, Principal
from perdure.protocol.events import FinishReason, Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    Calls,
    Coordinates,
    Delegated,
    Failure,
    Finished,
    ModelOutcome,
    NothingToRead,
    Parked,
    Programs,
    Resumed,
)
from perdure.protocol.wire import JsonObject, Wire
from perdure.session.state import Chain, Migrator
from perdure.store.base import Store
from perdure.store.values import NewRecord, Record, SessionRow

from .tools.records import Ask, Outcome, RequestedCall, Result, StoredStage


class Format:
    """A kind of record bodies. A record names it with a version: `perdure/failure/1`.

    A new version is a migrator here; the records of older versions stay as they are, and are lifted when they are read.
    """

    def __init__(self, name: str, migrators: Sequence[Migrator] = (), *, first: int = 1) -> None:
        self.name = name
        self.chain = Chain(f"record of the format {name!r}", migrators, first=first)

    @property
    def current(self) -> str:
        return f"{self.name}/{self.chain.version}"

    def includes(self, record: NewRecord) -> bool:
        """Whether the record has this format, in any version: one of a newer build, too."""
        # A worker asks this of all records of a session at once, and there are few formats.
        return _name_of(record.format) == self.name

    def lift(self, record: NewRecord) -> JsonObject:
        if record.format == self.current:
            return record.body
        if not self.includes(record):
            what = f"the format {record.format!r}; {self.current!r} was expected"
            raise UnreadableState(f"The record {record.key!r} has {what}.")
        version = record.format.rpartition("/")[2]
        return self.chain.lift(int(version) if version.isdecimal() else version, record.body)


@lru_cache(maxsize=256)
def _name_of(format: str) -> str:
    return format.rpartition("/")[0]


#: The body of a delivery, before a turn has consumed it.
BODY = Chain("delivery")

DELIVERY = Format("perdure/delivery")
REPLY = Format("pydantic-ai", first=2)
#: A reply without calls after which its turn went on. In the format of others, older builds would take it for the end.
STEERED = Format("perdure/steered")
FAILURE = Format("perdure/failure")
INTENT = Format("perdure/intent")
OUTCOME = Format("perdure/outcome")
PARK = Format("perdure/park")
RESUMPTION = Format("perdure/resumption")
MARK = Format("perdure/mark")
USAGE = Format("perdure/usage")
COMPACTION = Format("perdure/compaction")
CUT = Format("perdure/cut")
STAGE = Format("perdure/stage")
RUN_BEGUN = Format("perdure/run-begun")
RUN_SETTLED = Format("perdure/run-settled")

FORMATS = (
    *(DELIVERY, REPLY, STEERED, FAILURE, INTENT, OUTCOME, PARK, RESUMPTION, MARK, USAGE, COMPACTION, CUT, STAGE),
    *(RUN_BEGUN, RUN_SETTLED),
)

#: The key of the record of a turn that failed, was cancelled or parked outside its model call.
END = "end"
#: The key of the record of a parked turn that was cancelled.
CANCELLED_KEY = "cancelled"
#: The key of the record of processed answers; in step 0.
RESUME = "resume"

_LONGEST_MODEL = 200

W = TypeVar("W", bound=Wire)


class ConsumedDelivery(DeliveryBody):
    """A delivery in the journal of the turn that consumed it."""

    delivery_id: str
    # How often it was edited when it was read, which is not recorded; `heard`: how much of each lane it tells about.
    edits: int = Field(default=0, exclude=True)
    heard: dict[str, int] | None = None
    # What the model is told before it of what has happened to the session.
    notes: tuple[str, ...] = ()
    # The step of a running turn that it has entered. None: the turn began with it.
    step: int | None = None


class StoredReply(Wire):
    """The model's reply in the format of pydantic-ai, and what the harness has derived from it."""

    response: JsonObject
    finish_reason: FinishReason
    usage: Usage
    calls: tuple[RequestedCall, ...] = ()
    # How many of them run at the same time; None: recorded by a build without a limit.
    parallel: int | None = None
    # Whether the turn parked with this reply.
    parked: bool = False
    # Whether the turn goes on without calls, with a message that has come meanwhile.
    continues: bool = False
    # The turn's result; the turn ends with it once the other calls have ended.
    result: Result | None = None
    # The failure of the turn, if it failed although the model had replied.
    failure: Failure | None = None
    # When the turn fails, in seconds since the epoch: its calls end by then.
    deadline: float | None = None
    # A digest of the instructions that the model had. The text is not kept: it is rendered anew for each step.
    instructions: str | None = None
    # The principal for whom the model and its calls act. Replies of older builds do not have it.
    speaker: Principal | None = None

    @property
    def ends(self) -> bool:
        return not (self.calls or self.continues) or self.parked or self.failure is not None

    @property
    def asks(self) -> tuple[Ask, ...]:
        return tuple(call.ask for call in self.calls if call.ask)

    @property
    def open(self) -> tuple[OpenInput, ...]:
        # The step that asks shows its requests; those of programs may be shown by a later turn.
        return tuple(
            ask.open.model_copy(update={"first_shown": (ask.request.turn, ask.request.step)}) for ask in self.asks
        )

    def call(self, call_id: str) -> RequestedCall:
        for call in self.calls:
            if call.call_id == call_id:
                return call
        raise UnreadableState(f"The records of this step do not ask for the call {call_id!r}.")


class StoredFailure(Wire):
    """The end of a turn that failed."""

    failure: Failure
    usage: Usage = Usage()


class StoredPark(Wire):
    """The end of a turn that parked."""

    open: tuple[OpenInput, ...]


class StoredResumption(Wire):
    """The result of processed answers, and what the turn takes over from the turn that asked."""

    resumed: Resumed
    # Notes to the model.
    notes: tuple[str, ...] = ()
    # The speaker of the turn that asked: to approve a call does not make a principal the speaker.
    speaker: Principal | None = None
    output_schema: JsonObject | None = None


class StoredUsage(Wire):
    """What was paid for and is in no other record."""

    # What used it: `attempt`, a model call whose reply was not recorded, or something beside the steps.
    kind: str
    usage: Usage


class StoredMark(Wire):
    """The mark of notes to the model, in this turn and all later ones. Callers never see it."""

    mark: str


#: A turn and a step. The messages that open a turn come before its step 0.
Place: TypeAlias = tuple[int, int]


class StoredCompaction(Wire):
    """What later prompts leave out. The records that it is about stay as they are."""

    # Large results of tool calls before this place are shortened.
    trimmed: Place | None = None
    # Messages before this place are left out, and the summary stands for them; None: nothing is left out.
    until: Place | None = None
    summary: str | None = None
    # Why there is no summary.
    failure: Failure | None = None
    # The tokens of the request before the compaction, as they were estimated.
    tokens: int = 0
    usage: Usage = Usage()
    # The turns that were left out when a caller has requested it between two turns.
    left_out: tuple[tuple[int, int], ...] | None = None


def written(turn: int, step: int, key: str, form: Format, body: Wire) -> NewRecord:
    return NewRecord(turn=turn, step=step, key=key, format=form.current, body=body.model_dump(mode="json"))


def read(record: NewRecord, form: Format, shape: type[W]) -> W:
    body = form.lift(record)
    try:
        return shape.model_validate(body)
    except ValidationError as invalid:
        raise UnreadableState(f"The record {record.key!r} cannot be read.", problems=invalid.error_count()) from None


def dump_response(response: ModelResponse) -> JsonObject:
    return ModelMessagesTypeAdapter.dump_python([response], mode="json")[0]


#: A reply wraps the arguments of its calls, which may have the full depth of a value, in a few levels of its own.
_DEEPEST_REPLY = DEEPEST + 50

_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)


def readable(response: ModelResponse) -> ModelResponse:
    """The response with only what can be stored, sent and read again; raises if that is impossible."""
    dumped = dump_response(response)
    if deeper_than(dumped, _DEEPEST_REPLY):
        # Alone it might still be serializable, but not within a prompt.
        raise ValueError(f"The reply is nested deeper than {_DEEPEST_REPLY} levels.")
    return _RESPONSE.validate_python(repaired(dumped))


def load_response(reply: StoredReply) -> ModelResponse:
    # Older builds may have stored values that no provider accepts.
    try:
        return _RESPONSE.validate_python(repaired(reply.response))
    except ValidationError as invalid:
        raise UnreadableState("A reply cannot be read.", problems=invalid.error_count()) from None


def model_outcome(record: NewRecord) -> ModelOutcome:
    """The outcome of a model call, from the record of its reply or from another record that ended the turn."""
    if FAILURE.includes(record):
        failed = read(record, FAILURE, StoredFailure)
        return Finished(usage=failed.usage, failure=failed.failure)
    if PARK.includes(record):
        return Parked(open=read(record, PARK, StoredPark).open)
    if RESUMPTION.includes(record):
        return Finished(failure=read(record, RESUMPTION, StoredResumption).resumed.failure)
    return outcome_of_reply(read(record, STEERED if STEERED.includes(record) else REPLY, StoredReply))


def outcome_of_reply(reply: StoredReply) -> ModelOutcome:
    name = reply.response.get("model_name")
    # The model's name as the provider gives it. It is cut, because it becomes part of Temporal's history.
    model = quoted(name, _LONGEST_MODEL) if isinstance(name, str) and name else None
    if reply.parked:
        return Parked(open=reply.open, usage=reply.usage, model=model)
    if reply.ends:
        return Finished(usage=reply.usage, failure=reply.failure, model=model)
    calls = tuple(call.ref for call in reply.calls if call.ref and call.runs and not call.program)
    requested: dict[str, Any] = {"calls": calls, "parallel": reply.parallel, "open": reply.open}
    if keys := tuple(call.key for call in reply.calls if call.child):
        return Delegated(**requested, keys=keys, deadline=reply.deadline, usage=reply.usage, model=model)
    if programs := tuple(call.ref for call in reply.calls if call.ref and call.program):
        return Programs(**requested, programs=programs, usage=reply.usage, model=model)
    return Calls(**requested, usage=reply.usage, model=model)


class TurnJournal:
    """The records of one turn."""

    def __init__(self, records: Sequence[NewRecord]) -> None:
        self.records = tuple(records)
        self._by_key = {(record.step, record.key): record for record in records}
        self.last_step = max([record.step for record in records], default=0)
        # A history asks for each reply more than once, and parsing them is most of what a new worker does for it.
        self._replies: dict[int, StoredReply | None] = {}

    def at(self, step: int, key: str) -> NewRecord | None:
        return self._by_key.get((step, key))

    def deliveries(self) -> tuple[ConsumedDelivery, ...]:
        count = sum(step == 0 and key.startswith("delivery/") for step, key in self._by_key)
        return tuple(
            read(self._by_key[0, names.delivery_key(index)], DELIVERY, ConsumedDelivery) for index in range(count)
        )

    @property
    def began_at(self) -> float | None:
        """When the turn began, in seconds since the epoch. None: nothing of it is stored yet."""
        times = [record.at for record in self.records if isinstance(record, Record)]
        return datetime.fromisoformat(min(times)).timestamp() if times else None

    @property
    def principal(self) -> Principal | None:
        """The sender of the last message of this turn; an answer alone does not count."""
        senders = (
            delivery.principal for delivery in reversed(self.deliveries()) if delivery.is_message and delivery.principal
        )
        return next(senders, self.resumption.speaker if self.resumption else None)

    @property
    def mark(self) -> str | None:
        """The mark of notes, if this is the turn that introduced it."""
        record = self.at(0, names.MARK)
        return read(record, MARK, StoredMark).mark if record else None

    @property
    def output_schema(self) -> JsonObject | None:
        """The schema of this turn's result, from its deliveries or from the turn that it resumes."""
        schemas = (
            delivery.output_schema for delivery in reversed(self.deliveries()) if delivery.output_schema is not None
        )
        return next(schemas, self.resumption.output_schema if self.resumption else None)

    @property
    def resumption(self) -> StoredResumption | None:
        """The result of processed answers, if the turn began with that."""
        record = self.at(0, RESUME)
        return read(record, RESUMPTION, StoredResumption) if record and RESUMPTION.includes(record) else None

    def reply(self, step: int) -> StoredReply | None:
        if step not in self._replies:
            record = self.at(step, names.REPLY)
            form = next((each for each in (REPLY, STEERED) if record and each.includes(record)), None)
            self._replies[step] = read(record, form, StoredReply) if record and form else None
        return self._replies[step]

    def replies(self) -> tuple[StoredReply, ...]:
        return tuple(reply for step in range(self.last_step + 1) if (reply := self.reply(step)))

    def stages(self, step: int, call_id: str) -> tuple[StoredStage, ...]:
        """The stages of a program so far."""
        found: list[StoredStage] = []
        while record := self.at(step, names.stage_key(call_id, len(found))):
            found.append(read(record, STAGE, StoredStage))
        return tuple(found)

    def states_of_programs(self) -> int:
        """How many characters the stored states of all programs of the turn have."""
        stages = (read(record, STAGE, StoredStage) for record in self.records if STAGE.includes(record))
        return sum(len(stage.state or "") for stage in stages)

    def calls(self, step: int) -> tuple[RequestedCall, ...]:
        """The calls of a step: each call of the reply, and before it those that it has made as a program."""
        reply = self.reply(step)
        return tuple(
            each
            for call in (reply.calls if reply else ())
            for each in (*(self.calls_of(step, call.call_id) if call.program else ()), call)
        )

    def calls_of(self, step: int, call_id: str) -> tuple[RequestedCall, ...]:
        """The calls that a program has made."""
        return tuple(call for stage in self.stages(step, call_id) for call in stage.calls)

    def programs(self, step: int) -> tuple[RequestedCall, ...]:
        """The programs of a step that have not ended."""
        reply = self.reply(step)
        calls = reply.calls if reply else ()
        return tuple(call for call in calls if call.program and self.outcome(step, call.call_id) is None)

    def call(self, step: int, call_id: str) -> RequestedCall:
        for call in self.calls(step):
            if call.call_id == call_id:
                return call
        raise UnreadableState(f"The records of this step do not ask for the call {call_id!r}.")

    def outcome(self, step: int, call_id: str) -> Outcome | None:
        record = self.at(step, names.outcome_key(call_id))
        return read(record, OUTCOME, Outcome) if record else None

    def interrupted(self, step: int, call_id: str) -> bool:
        """Whether an attempt has recorded its intent to run the call."""
        return self.at(step, names.intent_key(call_id)) is not None

    def compactions(self, step: int | None = None) -> tuple[tuple[int, StoredCompaction], ...]:
        """The steps with compactions, in order; with `step` only those of this step."""
        found = sorted([(record.step, record.key) for record in self.records if COMPACTION.includes(record)])
        wanted = [each for each in found if step is None or each[0] == step]
        return tuple((each[0], read(self._by_key[each], COMPACTION, StoredCompaction)) for each in wanted)

    @property
    def usage(self) -> Usage:
        """What the turn has used so far, with all that is in no reply."""
        used = [reply.usage for reply in self.replies()] + [each.usage for _, each in self.compactions()]
        used += [read(record, USAGE, StoredUsage).usage for record in self.records if USAGE.includes(record)]
        return sum(used, Usage())

    def counted(self, step: int, outcome: ModelOutcome) -> ModelOutcome:
        """The outcome of a step with the usage of the summaries that were written for it."""
        used = [each.usage for _, each in self.compactions(step)]
        if not used or isinstance(outcome, NothingToRead):
            return outcome
        return outcome.model_copy(update={"usage": sum(used, outcome.usage)})

    @property
    def end_record(self) -> NewRecord | None:
        """The record that ended the turn."""
        if self.failure_record:
            return self.failure_record
        if self.resumption and self.resumption.resumed.failure:
            return self.at(0, RESUME)
        if park := next((record for record in self.records if PARK.includes(record)), None):
            return park
        last = self.reply(self.last_step)
        return self.at(self.last_step, names.REPLY) if last and last.ends else None

    @property
    def failure_record(self) -> NewRecord | None:
        """The record of a failure or a cancellation."""
        return next((record for record in self.records if FAILURE.includes(record)), None)

    @property
    def park(self) -> Parked | None:
        """How the turn has parked, if it did and has not been concluded since."""
        outcome = model_outcome(self.end_record) if self.end_record else None
        return outcome if isinstance(outcome, Parked) else None

    @property
    def is_cut(self) -> bool:
        """Whether it belongs to a fork that shares only its first steps."""
        return any(CUT.includes(record) for record in self.records)

    @property
    def is_settled(self) -> bool:
        """Whether each of its calls has ended, or never will: a later turn changes nothing of it."""
        if self.failure_record is not None:
            return True
        replies = ((step, self.reply(step)) for step in range(self.last_step + 1))
        calls = ((step, call.call_id) for step, reply in replies if reply for call in reply.calls)
        return all(self.at(step, names.outcome_key(call_id)) is not None for step, call_id in calls)

    def with_records(self, records: Sequence[NewRecord]) -> "TurnJournal":
        return TurnJournal([*self.records, *records])


async def read_journal(store: Store, session_id: str, turn: int) -> TurnJournal:
    return TurnJournal(await store.records(session_id, from_turn=turn, to_turn=turn))


async def find_session(store: Store, session_id: str, head: int | None = None) -> SessionRow:
    """The session's row. `head` is the known number of events: a store with fewer is an older copy."""
    row = await store.session(session_id)
    if row is None:
        raise SessionGone()
    if head is not None and row.events < head:
        raise StoreBehind(f"The store has {row.events} events of this session, which has had {head}.")
    return row


def find_agent(agents: AgentRegistry, name: str) -> Agent:
    agent = agents.get(name)
    if agent is None:
        raise AgentGone(f"The agent {name!r} of this session is no longer served.", agent=name)
    return agent


def view_of(row: SessionRow, at: Coordinates, speaker: Principal | None) -> SessionView:
    """The session as the author's code sees it; `speaker` is the principal for whom the turn acts, if known."""
    return SessionView(
        id=row.session_id,
        agent=row.agent,
        turn=at.turn,
        step=at.step,
        auth=speaker or row.principal,
        mode=row.mode,
        parent=row.parent,
        lane_of=row.lane_of,
    )
