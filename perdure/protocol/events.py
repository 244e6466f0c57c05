"""Events: the facts on a session's stream."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field

from .inputs import as_requested
from .names import session_key, turn_id, turn_key
from .wire import JsonObject, Wire

FinishReason: TypeAlias = Literal["content-filter", "error", "length", "other", "stop", "tool-calls"]


class EventType:
    """The types, as the wire spells them."""

    SESSION_STARTED = "session.started"
    SESSION_WAITING = "session.waiting"
    SESSION_COMPLETED = "session.completed"
    SESSION_FAILED = "session.failed"
    TURN_STARTED = "turn.started"
    TURN_COMPLETED = "turn.completed"
    TURN_FAILED = "turn.failed"
    INPUT_REQUESTED = "input.requested"
    RESULT_COMPLETED = "result.completed"
    MESSAGE_RECEIVED = "message.received"
    MESSAGE_APPENDED = "message.appended"
    MESSAGE_COMPLETED = "message.completed"
    REASONING_APPENDED = "reasoning.appended"
    REASONING_COMPLETED = "reasoning.completed"
    STEP_STARTED = "step.started"
    STEP_COMPLETED = "step.completed"
    STEP_FAILED = "step.failed"
    ACTION_INPUT_APPENDED = "action.input.appended"
    ACTIONS_REQUESTED = "actions.requested"
    ACTION_RESULT = "action.result"
    COMPACTION_REQUESTED = "compaction.requested"
    COMPACTION_COMPLETED = "compaction.completed"
    SUBAGENT_CALLED = "subagent.called"
    SUBAGENT_COMPLETED = "subagent.completed"
    # Beyond the contract; clients ignore types that they do not know.
    STEP_SUPERSEDED = "step.superseded"
    STEP_RECOVERED = "step.recovered"
    TURN_CANCELLED = "turn.cancelled"
    CANCEL_REQUESTED = "cancel.requested"
    INPUT_RESOLVED = "input.resolved"
    INPUT_REMINDED = "input.reminded"
    DELIVERY_REFUSED = "delivery.refused"
    INBOX_OVERFLOW = "inbox.overflow"
    STEER_APPLIED = "steer.applied"
    COMPACTION_FAILED = "compaction.failed"
    CONTEXT_CLEARED = "context.cleared"
    SESSION_ATTENTION = "session.attention"
    SESSION_RECOVERED = "session.recovered"
    SESSION_REBUILT = "session.rebuilt"
    SESSION_FORKED = "session.forked"
    SESSION_IMPORTED = "session.imported"
    SESSION_RESET = "session.reset"
    SESSION_ROLLED_BACK = "session.rolled_back"
    PLAN_UPDATED = "plan.updated"
    CHECKPOINT_CREATED = "checkpoint.created"
    CHECKPOINT_FAILED = "checkpoint.failed"
    CHECKPOINT_DISCARDED = "checkpoint.discarded"
    # Of runs.
    RUN_STARTED = "run.started"
    RUN_STEP_COMPLETED = "run.step.completed"
    RUN_STEP_FAILED = "run.step.failed"
    RUN_LOG = "run.log"
    RUN_WAITING = "run.waiting"
    RUN_COMPLETED = "run.completed"
    RUN_FAILED = "run.failed"
    RUN_CANCELLED = "run.cancelled"


class BesideType:
    """What happens beside the events: a timeline shows it. It is in no log and has no index."""

    DELIVERY_QUEUED = "delivery.queued"
    DELIVERY_CLAIMED = "delivery.claimed"
    ATTEMPT_STARTED = "attempt.started"
    ATTEMPT_ENDED = "attempt.ended"
    STEP_RETRYING = "step.retrying"
    TURN_PAUSED = "turn.paused"
    TURN_RESUMED = "turn.resumed"


#: The type of what stands for an event that retention has deleted. It is never stored.
EVENT_EXPIRED = "event.expired"

#: What an API says of a running turn that no worker has taken over. It is in no log and has no index.
SESSION_STALLED = "session.stalled"

#: Deltas are stored without the text so far; the API adds it when it serves them (`messageSoFar`, `reasoningSoFar`).
DELTAS = {
    EventType.MESSAGE_APPENDED: ("messageDelta", "messageSoFar"),
    EventType.REASONING_APPENDED: ("reasoningDelta", "reasoningSoFar"),
}

#: Pieces of what comes whole later.
PIECES = (*DELTAS, EventType.ACTION_INPUT_APPENDED)

#: After one of these the session accepts the next delivery, or has ended.
BOUNDARIES = frozenset({EventType.SESSION_WAITING, EventType.SESSION_COMPLETED, EventType.SESSION_FAILED})

#: One of these is the last event of a run's stream.
RUN_ENDS = frozenset({EventType.RUN_COMPLETED, EventType.RUN_FAILED, EventType.RUN_CANCELLED})

#: One of these is the last event of a stream.
TERMINAL = frozenset({EventType.SESSION_COMPLETED, EventType.SESSION_FAILED}) | RUN_ENDS


#: How the stored data of older versions is lifted, by the type of the event: the first function lifts version 1 to 2.
#: A shipped one is never edited.
EVENT_MIGRATORS: dict[str, tuple[Callable[[JsonObject], JsonObject], ...]] = {
    EventType.INPUT_REQUESTED: (as_requested,),
}

#: The field of the stored data that holds its version. Readers never see it. Data without it has version 1.
_VERSION = "$version"


def stored_data(type: str, data: JsonObject | None) -> JsonObject | None:
    """The data of an event as it is stored."""
    migrators = EVENT_MIGRATORS.get(type, ())
    return {**data, _VERSION: len(migrators) + 1} if migrators and data is not None else data


def read_data(type: str, stored: JsonObject | None) -> JsonObject | None:
    """The data of a stored event, in today's version. What a newer build has stored is shown as it is."""
    migrators = EVENT_MIGRATORS.get(type, ())
    if stored is None or (not migrators and _VERSION not in stored):
        return stored
    data = {name: value for name, value in stored.items() if name != _VERSION}
    for migrate in migrators[stored.get(_VERSION, 1) - 1 :]:
        data = migrate(data)
    return data


class NewEvent(Wire):
    """An event that has no index yet. `key` is deterministic and unique in its session."""

    type: str
    key: str
    data: JsonObject | None = None
    turn: int | None = None
    step: int | None = None
    attempt: int | None = None
    delivery_ids: tuple[str, ...] = ()


class Event(NewEvent):
    """An event as the store keeps it."""

    index: int
    at: str = Field(description="ISO-8601, UTC, milliseconds; stamped once, when first written")


class Usage(Wire):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
        )


#: The code of a delivery that its sender has taken back before a turn read it.
WITHDRAWN = "withdrawn"


#: The code of one that waited while a later message interrupted its session, or that a later one tells of.
SUPERSEDED = "superseded"
#: The code of one that was dropped because too many waited, as its lane declares.
OVERFLOWED = "inbox_overflow"


def delivery_refused(delivery_id: str, code: str, message: str) -> NewEvent:
    """The event for a delivery that no turn will read, with the reason."""
    return NewEvent(
        type=EventType.DELIVERY_REFUSED,
        key=session_key(f"refused/{delivery_id}"),
        data={"deliveryId": delivery_id, "code": code, "message": message},
        delivery_ids=(delivery_id,),
    )


def inbox_overflow(accepted: str, delivery_ids: Sequence[str], policy: str) -> NewEvent:
    """The event for the deliveries that have made room for the accepted one, or that one itself."""
    return NewEvent(
        type=EventType.INBOX_OVERFLOW,
        key=session_key(f"overflow/{accepted}"),
        data={"deliveryIds": list(delivery_ids), "policy": policy},
    )


def cancel_requested(turn: int) -> NewEvent:
    """The event for an accepted request to stop this turn."""
    return NewEvent(
        type=EventType.CANCEL_REQUESTED,
        key=turn_key(turn, "cancel-requested"),
        data={"turnId": turn_id(turn)},
        turn=turn,
    )


def turn_coordinates(turn: int) -> dict[str, Any]:
    """The fields that every event of a turn has."""
    return {"sequence": turn, "turnId": turn_id(turn)}


def step_coordinates(turn: int, step: int) -> dict[str, Any]:
    """The fields that every event of a step has."""
    return {"sequence": turn, "stepIndex": step, "turnId": turn_id(turn)}
