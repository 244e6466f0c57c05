"""The small state of a session, as the driver and as the turn see it."""

import json
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, ValidationError

from perdure.errors import UnreadableState
from perdure.protocol.deliveries import Capabilities, DeliveryRef, Mode
from perdure.protocol.events import Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Failure, Snapshot, TurnResult
from perdure.protocol.wire import DEEPEST, JsonObject, Wire, deeper_than

from . import migrations

#: Deliveries that the driver remembers to have seen. The store remembers all of them; this is the last line.
REMEMBERED_DELIVERIES = 512

Cancel: TypeAlias = Literal["this", "next"]
Repair: TypeAlias = Literal["retry", "rebuild", "fail"]

#: Of each text in a delivery's reference; and of the reference, as JSON.
_LONGEST = 255
_LARGEST = 2_048

#: A session changes its token in its first turn, once per call that does so.
_RETIRED = 16

#: Seconds until a turn that could not go on is tried again: at first, and at most.
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 600.0


class Rebuild(Wire):
    """Why the state has to be derived from the store, and what the session ends with afterwards, if it does."""

    reason: str
    ends: Failure | None = None


#: What a session ends with when an operator has ended it, or its workflow.
OPERATOR_FAILED = Failure(code="SESSION_FAILED", message="The session was ended by an operator.", structural=True)
OPERATOR_TERMINATED = Failure(
    code="SESSION_TERMINATED", message="The session's workflow was terminated by an operator.", structural=True
)
OPERATOR_CANCELLED = Failure(
    code="SESSION_CANCELLED", message="The session was cancelled by an operator.", structural=True
)


class SessionState(Wire):
    """What the driver carries from turn to turn and from run to run. A few kilobytes, whatever the session's age."""

    version: int = migrations.SESSION.version
    session_id: str
    agent: str
    # The model that answered last; a label for people, no decision rests on it.
    model: str | None = None
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    token_hash: str
    # Tokens that were the session's before: what was accepted with one of them may still be on its way.
    retired: tuple[str, ...] = ()
    # The number of the next turn.
    turn: int = 0
    # The same as readers count: turns that told them nothing do not count. A driver of old knew none of those.
    told: int | None = None
    inbox: tuple[DeliveryRef, ...] = ()
    seen: tuple[str, ...] = ()
    snapshot: Snapshot = Snapshot()
    # What waits for people.
    open: tuple[OpenInput, ...] = ()
    # Whether the turn that runs, waits or comes next is to be stopped, or the one after it.
    cancel: Cancel | None = None
    # A turn that could not go on, how often it was tried, and when it is tried again (seconds since the epoch).
    held: JsonObject | None = None
    tries: int = 0
    retry_at: float | None = None
    # How many events the session had when its last turn ended.
    head: int | None = None
    # Set in a driver that must derive all of this from the store first.
    rebuild: Rebuild | None = None

    @property
    def next_told(self) -> int:
        return self.turn if self.told is None else self.told

    def hears(self, delivery: DeliveryRef, *, in_order: bool = True) -> "SessionState":
        """Queue a delivery, once: behind those that were accepted before it."""
        if delivery.id in self.seen or any(each.id == delivery.id for each in self.inbox):
            return self
        place = len(self.inbox)
        while in_order and place > 0 and _overtakes(self.inbox[place - 1], delivery):
            place -= 1
        return self.model_copy(
            update={
                "inbox": (*self.inbox[:place], delivery, *self.inbox[place:]),
                "seen": _remembered(*self.seen, delivery.id),
            }
        )

    def is_overtaken(self, delivery: DeliveryRef) -> bool:
        """Whether a delivery that was accepted later is in the inbox already."""
        return any(_overtakes(each, delivery) for each in self.inbox)

    def without(self, *deliveries: DeliveryRef) -> "SessionState":
        taken = {delivery.id for delivery in deliveries}
        return self.model_copy(update={"inbox": tuple(each for each in self.inbox if each.id not in taken)})

    def reminded(self, request: OpenInput) -> "SessionState":
        """The next reminder of this request is the one after."""
        later = request.model_copy(update={"remind_at": request.remind_at[1:]})
        return self.model_copy(update={"open": tuple(later if each is request else each for each in self.open)})

    def withdrawn(self) -> "SessionState":
        """Nobody is asked any more."""
        return self.model_copy(update={"open": (), "cancel": None})

    def cancelled(self, cancel: Cancel | None) -> "SessionState":
        return self.model_copy(update={"cancel": cancel})

    def holding(
        self, request: JsonObject, token_hash: str | None, now: float, retired: tuple[str, ...] = ()
    ) -> "SessionState":
        """The turn could not go on: it is tried again later, and less and less often."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self.tries, 16))
        held = {"held": request, "tries": self.tries + 1, "retry_at": now + pause}
        return self.model_copy(update=held)._rekeyed(token_hash, retired)

    def due(self) -> "SessionState":
        """There is news: a turn that could not go on is tried again at once."""
        return self if self.held is None else self.model_copy(update={"retry_at": 0.0})

    def after_turn(self, result: TurnResult, *, counts_silent: bool = False) -> "SessionState":
        """Take over what the turn left: its snapshot, and the session's new token if it changed.

        A turn that told nothing leaves its number to the next one, so that drivers and readers count alike. Runs that
        began before this rule did count it (`counts_silent`).
        """
        told = self.next_told if result.silent else self.turn + 1
        # A turn that was just parking when it was cancelled has not noticed: what it asked is withdrawn.
        cancel = "this" if self.cancel == "next" or (self.cancel == "this" and result.open) else None
        turn = self.turn if result.silent and not counts_silent else self.turn + 1
        done = {"turn": turn, "told": told, "snapshot": result.snapshot, "open": result.open, "cancel": cancel}
        # Only a rebuild takes it back: a store that has fewer events is older than the session.
        head = max((known for known in (self.head, result.head) if known is not None), default=None)
        state = self.model_copy(update={**done, "head": head, "held": None, "tries": 0, "retry_at": None})
        return state._rekeyed(result.token_hash, result.retired)

    def rebuilt(self, found: "SessionState") -> "SessionState":
        """The state as the store has it, with what has arrived since it was read."""
        for delivery in self.inbox:
            found = found.hears(delivery)
        return found

    def _rekeyed(self, token_hash: str | None, retired: tuple[str, ...]) -> "SessionState":
        """The session owns this token now; the one before, and those in between, were its own for some time."""
        if token_hash is None:
            return self
        before = dict.fromkeys((*self.retired, self.token_hash, *retired))
        kept = tuple(each for each in before if each != token_hash)[-_RETIRED:]
        return self.model_copy(update={"token_hash": token_hash, "retired": kept})


def _remembered(*ids: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))[-REMEMBERED_DELIVERIES:]


def _overtakes(one: DeliveryRef, other: DeliveryRef) -> bool:
    return one.at is not None and other.at is not None and one.at > other.at


def read_delivery(data: Any) -> DeliveryRef | None:
    """A signal's payload, if it is a delivery."""
    try:
        delivery = DeliveryRef.model_validate(data)
    except ValidationError:
        return None
    # No API writes another one. The refusal of an id that no store can look up would be tried for ever.
    texts = (delivery.id, delivery.token_hash, delivery.traceparent or "", delivery.at or "")
    return delivery if delivery.id and all(len(text) <= _LONGEST and text.isprintable() for text in texts) else None


def can_be_kept(data: Any) -> bool:
    """Whether a signal's payload can be kept for a newer build, which may have accepted it: as JSON, in an input."""
    try:
        return not deeper_than(data, DEEPEST) and len(json.dumps(data)) <= _LARGEST
    except (TypeError, ValueError):
        return False


class _OfTurn(Wire):
    turn_id: str = Field(pattern=r"^turn_\d{1,9}$")


def read_turn(data: Any) -> int | None:
    """The turn that a signal is about, if it names one."""
    try:
        return int(_OfTurn.model_validate(data).turn_id.removeprefix("turn_"))
    except ValidationError:
        return None


class RepairOrder(Wire):
    """What is to be done about a session, and for a rebuild, why."""

    how: Repair
    reason: str = "OPERATOR"


def read_repair(data: Any) -> RepairOrder | None:
    """What is to be done, if it is something that can be done."""
    try:
        return RepairOrder.model_validate(data)
    except ValidationError:
        return None


def load_session(data: JsonObject) -> SessionState:
    """Read the driver's state, whichever version wrote it."""
    try:
        state = SessionState.model_validate(_with_deliveries(migrations.SESSION.lift(data.get("version", 1), data)))
    except ValidationError as invalid:
        raise UnreadableState("The session state cannot be read.", problems=invalid.error_count()) from None
    # What came in while nobody could read the state was put there as it came, perhaps more than once.
    first = {delivery.id: delivery for delivery in reversed(state.inbox)}
    inbox = tuple(delivery for delivery in state.inbox if first[delivery.id] is delivery)
    return state.model_copy(update={"inbox": inbox, "seen": _remembered(*state.seen, *first)})


def _with_deliveries(data: JsonObject) -> JsonObject:
    """Without what came in as a signal, and is no delivery after all. What is one waits in the store as well."""
    if not isinstance(inbox := data.get("inbox"), list):
        return data
    return {**data, "inbox": [each for each in cast("list[Any]", inbox) if read_delivery(each)]}


class TurnState(Wire):
    """What turns remember of one another. Opaque to the driver, which may be older than the turn."""

    usage: Usage = Usage()
    steps: int = 0
    failed_turns: int = 0
    # Kept so that a newer turn's field survives an older turn's pass.
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])

    def after_step(self, usage: Usage) -> "TurnState":
        return self.model_copy(update={"usage": self.usage + usage, "steps": self.steps + 1})

    def after_failure(self) -> "TurnState":
        return self.model_copy(update={"failed_turns": self.failed_turns + 1})


def load_turn(snapshot: Snapshot) -> TurnState:
    data = migrations.SNAPSHOT.lift(snapshot.version, snapshot.data)
    known = {key: value for key, value in data.items() if key in _TURN_FIELDS}
    unknown = {key: value for key, value in data.items() if key not in _TURN_FIELDS}
    try:
        return TurnState.model_validate({**known, "extra": unknown})
    except ValidationError as invalid:
        raise UnreadableState("The turn snapshot cannot be read.", problems=invalid.error_count()) from None


def dump_turn(state: TurnState) -> Snapshot:
    data = state.model_dump(mode="json", exclude={"extra"})
    return Snapshot(version=migrations.SNAPSHOT.version, data={**state.extra, **data})


_TURN_FIELDS = frozenset(field.alias or name for name, field in TurnState.model_fields.items() if name != "extra")
