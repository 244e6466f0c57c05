"""The small state of a session, as the driver and as the turn see it."""

from typing import Any

from pydantic import Field, ValidationError

from perdure.errors import UnreadableState
from perdure.protocol.deliveries import Capabilities, DeliveryRef, Mode
from perdure.protocol.events import Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Snapshot, TurnResult
from perdure.protocol.wire import JsonObject, Wire

from . import migrations

#: Deliveries that the driver remembers to have seen. The store remembers all of them; this is the last line.
REMEMBERED = 512


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
    # The number of the next turn.
    turn: int = 0
    # The same as readers count: turns that told them nothing do not count. A driver of old knew none of those.
    told: int | None = None
    inbox: tuple[DeliveryRef, ...] = ()
    seen: tuple[str, ...] = ()
    snapshot: Snapshot = Snapshot()
    # What waits for people.
    open: tuple[OpenInput, ...] = ()

    @property
    def next_told(self) -> int:
        return self.turn if self.told is None else self.told

    def hears(self, delivery: DeliveryRef) -> "SessionState":
        """Queue a delivery, once."""
        if delivery.id in self.seen:
            return self
        return self.model_copy(
            update={
                "inbox": (*self.inbox, delivery),
                "seen": (*self.seen, delivery.id)[-REMEMBERED:],
            }
        )

    def without(self, delivery: DeliveryRef) -> "SessionState":
        return self.model_copy(update={"inbox": tuple(each for each in self.inbox if each is not delivery)})

    def reminded(self, request: OpenInput) -> "SessionState":
        """The next reminder of this request is the one after."""
        later = request.model_copy(update={"remind_at": request.remind_at[1:]})
        return self.model_copy(update={"open": tuple(later if each is request else each for each in self.open)})

    def withdrawn(self) -> "SessionState":
        """Nobody is asked any more."""
        return self.model_copy(update={"open": ()})

    def after_turn(self, result: TurnResult) -> "SessionState":
        """Take over what the turn left: its snapshot, and the session's new token if it changed."""
        told = self.next_told if result.silent else self.turn + 1
        done = {"turn": self.turn + 1, "told": told, "snapshot": result.snapshot, "open": result.open}
        state = self.model_copy(update=done)
        if result.token_hash is None or result.token_hash == self.token_hash:
            return state
        # Deliveries that were accepted with the old token while it was valid stay accepted.
        inbox = tuple(
            delivery.model_copy(update={"token_hash": result.token_hash})
            if delivery.token_hash == self.token_hash
            else delivery
            for delivery in self.inbox
        )
        return state.model_copy(update={"token_hash": result.token_hash, "inbox": inbox})


def read_delivery(data: Any) -> DeliveryRef | None:
    """A signal's payload, if it is a delivery."""
    try:
        return DeliveryRef.model_validate(data)
    except ValidationError:
        return None


class _OfTurn(Wire):
    turn_id: str = Field(pattern=r"^turn_\d{1,9}$")


def read_turn(data: Any) -> int | None:
    """The turn that a signal is about, if it names one."""
    try:
        return int(_OfTurn.model_validate(data).turn_id.removeprefix("turn_"))
    except ValidationError:
        return None


def load_session(data: JsonObject) -> SessionState:
    """Read the driver's state, whichever version wrote it."""
    try:
        return SessionState.model_validate(migrations.SESSION.lift(data.get("version", 1), data))
    except ValidationError as invalid:
        raise UnreadableState("The session state cannot be read.", problems=invalid.error_count()) from None


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
