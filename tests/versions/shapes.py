"""The durable shapes: what this build stores, and how it reads what older builds have stored."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from perdure import Plan, PlanStep, State
from perdure.agents.progress.plan import PLAN
from perdure.harness import journal
from perdure.harness.journal import Format
from perdure.harness.rebuild import StoredCut
from perdure.harness.runs import records as run_records
from perdure.harness.tools import approvals, records
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, DeliveryRef
from perdure.protocol.events import EVENT_MIGRATORS, EventType, read_data, stored_data
from perdure.protocol.inputs import InputAnswer, InputRequest
from perdure.protocol.requests import Snapshot, TurnRequest
from perdure.protocol.runs import RunBody, RunState
from perdure.protocol.wire import JsonObject, Wire
from perdure.session import inputs, state
from perdure.session.state import Chain, Migrator, SessionState, TurnState
from perdure.store.checkpoints import SNAPSHOT_VERSION
from perdure.store.engine.history.checkpoints import add_slot, slots_of
from perdure.store.lifecycle import ExportedRecord, ExportedSlot, ExportEnd, ExportHeader
from perdure.store.values import NewRecord

from .sample import sample_of
from .story import Events, events_of_all_types

Samples = Callable[[], Awaitable[Sequence[Any]]]


@dataclass(frozen=True)
class Shape:
    """One kind of values that outlive a build."""

    name: str
    #: Values that this build stores, as JSON; together they have every field.
    samples: Samples
    #: Reads a stored value of a version, and returns it in today's form, as JSON.
    load: Callable[[int, Any], Any]
    #: The first one lifts version `first` to the next.
    migrators: Sequence[Migrator] = ()
    first: int = 1
    #: The field whose form belongs to a library, which may add to it.
    foreign: str | None = None

    @property
    def version(self) -> int:
        return self.first + len(self.migrators)


def _dumped(value: BaseModel) -> JsonObject:
    return value.model_dump(mode="json")


def _of(make: Callable[[], Any]) -> Samples:
    async def samples() -> Sequence[Any]:
        return [make()]

    return samples


# --- state --------------------------------------------------------------------------------------------------


def _session() -> Shape:
    def load(version: int, stored: JsonObject) -> JsonObject:
        return _dumped(state.load_session({**stored, "version": version}))

    chain = state.SESSION
    samples = _of(lambda: _dumped(sample_of(SessionState, kind="message")))
    return Shape("session-state", samples, load, chain.migrators, chain.first)


def _snapshot() -> Shape:
    def sample() -> JsonObject:
        return state.dump_turn(sample_of(TurnState, extra={})).data

    def load(version: int, stored: JsonObject) -> JsonObject:
        return state.dump_turn(state.load_turn(Snapshot(version=version, data=stored))).data

    return Shape("turn-snapshot", _of(sample), load, state.SNAPSHOT.migrators, state.SNAPSHOT.first)


class _Cart(BaseModel):
    items: dict[str, int] = {}


def _slots() -> list[Shape]:
    """How slots are stored; their values and versions are their authors'."""

    def counted(items: Any) -> Any:
        return {"items": {name: 1 for name in items}}

    first = State("a cart of the fixtures", list[str])
    second = State("a cart of the fixtures", _Cart, version=2, migrate={1: counted})

    def load(_: int, stored: JsonObject) -> JsonObject:
        assert second.read(stored) == _Cart(items={"tea": 1})
        return stored

    old = _of(lambda: first.stored(["tea"]))
    new = _of(lambda: second.stored(_Cart(items={"tea": 1})))
    return [
        Shape("slot-without-version", old, lambda _, stored: {**stored, **load(_, stored)}),
        Shape("slot", new, load),
    ]


def _plan() -> Shape:
    steps = (PlanStep(step_id=1, title="Water", status="done", done_at="2026-01-01T00:00:00.000Z"),)
    plan = Plan(objective="Tea", steps=(*steps, PlanStep(step_id=2, title="Leaves")))

    def load(_: int, stored: JsonObject) -> JsonObject:
        read = PLAN.read(stored)
        assert read is not None
        return PLAN.stored(read)

    return Shape("slot-of-plan", _of(lambda: PLAN.stored(plan)), load)


def _checkpoint() -> Shape:
    """The snapshot of a session: the slots that a rollback makes of it are those that it was made of."""
    slots: dict[str, JsonObject] = {
        "cart": {"value": {"tea": 1}},
        "newer": {"version": 2, "data": [1]},
        PLAN.name: {"value": {"objective": "Tea", "steps": [], "status": "active"}},
        f"{names.SLICE_PREFIX}found": {"value": ["tea"], "slice": {"itemType": "str", "policy": "log"}},
    }
    about = {"sessionId": "s", "createdAt": "", "takenAt": "", "turn": 0, "step": 1, "tags": {"team": "tea"}}

    def made(of: dict[str, JsonObject], **more: Any) -> JsonObject:
        snapshot: JsonObject = {"version": SNAPSHOT_VERSION, **more, "slices": [], "slots": {}, "plan": None}
        for name, stored in of.items():
            add_slot(snapshot, name, stored)
        return snapshot

    def load(_: int, stored: JsonObject) -> JsonObject:
        more = {
            name: value for name, value in stored.items() if name not in ("slices", "slots", "slotVersions", "plan")
        }
        return made(slots_of({"version": SNAPSHOT_VERSION, **stored}), **more)

    return Shape("checkpoint", _of(lambda: made(slots, **about, parentId="p", childrenIds=["c"])), load)


def _approvals() -> Shape:
    def load(version: int, stored: JsonObject) -> JsonObject:
        return {**stored, "keys": sorted(approvals.read_remembered({**stored, "version": version}))}

    chain = approvals.REMEMBERED
    return Shape("slot-of-approvals", _of(lambda: {"keys": ["pay"]}), load, chain.migrators, chain.first)


# --- deliveries and inputs ----------------------------------------------------------------------------------


def _delivery() -> Shape:
    def load(version: int, stored: JsonObject) -> JsonObject:
        return _dumped(DeliveryBody.model_validate(journal.BODY.lift(version, stored)))

    samples = _of(lambda: _dumped(sample_of(DeliveryBody, kind="message")))
    return Shape("delivery", samples, load, journal.BODY.migrators, journal.BODY.first)


def _reference() -> Shape:
    def load(_: int, stored: JsonObject) -> JsonObject:
        delivery = state.read_delivery(stored)
        assert delivery is not None
        return _dumped(delivery)

    return Shape("delivery-reference", _of(lambda: _dumped(sample_of(DeliveryRef, kind="message"))), load)


def _plain(name: str, model: type[BaseModel], chain: Chain | None = None) -> Shape:
    chain = chain or Chain(name)

    def load(version: int, stored: JsonObject) -> JsonObject:
        return _dumped(model.model_validate(chain.lift(version, stored)))

    return Shape(name, _of(lambda: _dumped(sample_of(model))), load, chain.migrators, chain.first)


#: The lines of an exported session.
EXPORTED: dict[str, type[Wire]] = {
    "header": ExportHeader,
    "slot": ExportedSlot,
    "record": ExportedRecord,
    "end": ExportEnd,
}


# --- records ------------------------------------------------------------------------------------------------

#: The bodies of each format of records.
BODIES: dict[Format, type[Wire]] = {
    journal.DELIVERY: journal.ConsumedDelivery,
    journal.REPLY: journal.StoredReply,
    journal.STEERED: journal.StoredReply,
    journal.FAILURE: journal.StoredFailure,
    journal.INTENT: records.Intent,
    journal.OUTCOME: records.Outcome,
    journal.PARK: journal.StoredPark,
    journal.RESUMPTION: journal.StoredResumption,
    journal.MARK: journal.StoredMark,
    journal.USAGE: journal.StoredUsage,
    journal.COMPACTION: journal.StoredCompaction,
    journal.CUT: StoredCut,
    journal.STAGE: records.StoredStage,
    journal.RUN_BEGUN: run_records.Begun,
    journal.RUN_SETTLED: run_records.Settled,
}

_RESPONSE = ModelResponse(
    parts=[ThinkingPart("Tea?"), TextPart("Tea."), ToolCallPart("add", {"sku": "tea"}, tool_call_id="call_1")],
    usage=RequestUsage(input_tokens=10, output_tokens=5),
    model_name="provider-model",
    finish_reason="tool_call",
)


def _record(form: Format, model: type[Wire]) -> Shape:
    def sample() -> JsonObject:
        body = _dumped(sample_of(model, response={}))
        if form in (journal.REPLY, journal.STEERED):
            body["response"] = {**journal.dump_response(_RESPONSE), "timestamp": "2026-01-01T00:00:00Z"}
        return body

    def load(version: int, stored: JsonObject) -> JsonObject:
        read = journal.read(NewRecord(0, 0, "key", f"{form.name}/{version}", stored), form, model)
        if isinstance(read, journal.StoredReply):
            assert [part.part_kind for part in journal.load_response(read).parts] == ["thinking", "text", "tool-call"]
        return _dumped(read)

    name, chain = f"record-{form.name.rpartition('/')[2]}", form.chain
    return Shape(
        name,
        _of(sample),
        load,
        chain.migrators,
        chain.first,
        "response" if form in (journal.REPLY, journal.STEERED) else None,
    )


# --- events -------------------------------------------------------------------------------------------------


class _Story:
    """The events of all types, which happen once."""

    def __init__(self) -> None:
        self._events: Events | None = None

    async def of(self, type: str) -> Sequence[Any]:
        self._events = self._events or await events_of_all_types()
        return [stored_data(type, data) for data in self._events.get(type, [])]


def _event(type: str, story: _Story) -> Shape:
    async def samples() -> Sequence[Any]:
        return await story.of(type)

    def load(_: int, stored: JsonObject | None) -> JsonObject | None:
        return read_data(type, stored)

    return Shape(f"event-{type}", samples, load, EVENT_MIGRATORS.get(type, ()))


EVENT_TYPES = [value for name, value in vars(EventType).items() if name.isupper()]


def shapes() -> list[Shape]:
    story = _Story()
    return [
        _session(),
        _snapshot(),
        *_slots(),
        _plan(),
        _checkpoint(),
        _approvals(),
        _delivery(),
        _reference(),
        _plain("input-request", InputRequest, inputs.REQUEST),
        _plain("input-answer", InputAnswer, inputs.ANSWER),
        _plain("turn-request", TurnRequest),
        _plain("run-state", RunState),
        _plain("run-body", RunBody),
        *(_plain(f"export-{name}", model) for name, model in EXPORTED.items()),
        *(_record(form, model) for form, model in BODIES.items()),
        *(_event(type, story) for type in EVENT_TYPES),
    ]
