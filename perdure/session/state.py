"""The state of a session that travels through Temporal: the driver's, the turn's snapshot, and the tokens' hashes."""

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, ValidationError

from perdure.bounds import DEEPEST, deeper_than
from perdure.errors import UnreadableState
from perdure.protocol.deliveries import (
    CHILD_ANSWER,
    CHILD_INPUT,
    CHILD_KINDS,
    CHILD_RESULT,
    CONTROLS,
    Bounds,
    Capabilities,
    DeliveryRef,
    Mode,
)
from perdure.protocol.events import Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Awaited, Failure, Snapshot, TurnResult
from perdure.protocol.wire import JsonObject, Wire

Migrator: TypeAlias = Callable[[JsonObject], JsonObject]


class Chain:
    """Migrators in order; the first lifts version 1 to 2.

    A shipped migrator is never edited; write the next one. A value that is newer than this code is refused: to start
    with an empty state would lose the session silently.
    """

    def __init__(self, name: str, migrators: Sequence[Migrator] = (), *, first: int = 1) -> None:
        self.name = name
        self.first = first
        self.migrators = tuple(migrators)

    @property
    def version(self) -> int:
        return self.first + len(self.migrators)

    def lift(self, version: object, data: JsonObject) -> JsonObject:
        if not isinstance(version, int) or not self.first <= version <= self.version:
            raise UnreadableState(
                f"The {self.name} has version {version!r}; this code reads versions {self.first} to {self.version}.",
                version=version,
            )
        try:
            for migrate in self.migrators[version - self.first :]:
                data = migrate(data)
        except Exception as error:
            # Another build may have a migrator that can lift it.
            raised = f"a migrator of the {self.name} raised {type(error).__name__}"
            raise UnreadableState(f"Version {version} could not be lifted: {raised}.", version=version) from error
        return data


SNAPSHOT = Chain("turn snapshot")
SESSION = Chain("session state")


def version_patch(version: int) -> str:
    """The patch that guards a version of the session state after the first.

    A run that began when its build could not read its state must treat it as unreadable, so that it replays alike.
    """
    return f"session-state-{version}"


#: Ids of deliveries that the driver keeps to drop duplicates. The store knows all ids; this is the last check.
REMEMBERED_DELIVERIES = 512

#: The kinds of deliveries that this build can read. The value is the patch that guards a kind that was added later: a
#: run that began before it must treat the kind as unknown, so that it replays alike.
KINDS: dict[str, str | None] = {
    "message": None,
    "answer": None,
    **dict.fromkeys(sorted(CONTROLS), "controls"),
    **dict.fromkeys(sorted(CHILD_KINDS), "children"),
}
#: The versions of a delivery's reference that this build can read, and their patches, in the same way.
REFERENCE_VERSIONS: dict[int, str | None] = {1: None}
#: The prefix of a delivery's kind in the inbox of a run that cannot read it. A run that knows the kind begins without.
UNKNOWN = "?"

Cancel: TypeAlias = Literal["this", "next"]
Repair: TypeAlias = Literal["retry", "rebuild", "fail"]

#: Limits in characters: of each text in a delivery's reference, and of the whole reference as JSON.
_LONGEST = 255
_LARGEST = 2_048

#: The most deliveries of unknown kinds that a driver keeps. The sweeper signals the others again.
_MOST_UNKNOWN = 200

#: Replaced tokens that are kept.
_RETIRED = 16

#: Seconds until a held turn is started again: the first pause, and the longest.
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 600.0


class Rebuild(Wire):
    """Why the state has to be derived from the store, and the failure that ends the session afterwards, if any."""

    reason: str
    ends: Failure | None = None


#: The failures with which a session ends when an operator has ended it, or its workflow.
OPERATOR_FAILED = Failure(code="SESSION_FAILED", message="The session was ended by an operator.", structural=True)
OPERATOR_TERMINATED = Failure(
    code="SESSION_TERMINATED", message="The session's workflow was terminated by an operator.", structural=True
)
OPERATOR_CANCELLED = Failure(
    code="SESSION_CANCELLED", message="The session was cancelled by an operator.", structural=True
)


SESSION_DEADLINE = Failure(
    code="SESSION_DEADLINE_EXCEEDED", message="The session was ended at its deadline.", structural=True
)
SESSION_IDLE = Failure(
    code="SESSION_IDLE", message="The session was ended because nothing had happened in it for long.", structural=True
)


class ParentRef(Wire, extra="allow"):
    """The session that waits for this one, and the key of its action."""

    session_id: str
    action: str
    root_session_id: str


class SessionState(Wire, extra="allow"):
    """What the driver keeps between turns and runs. Its size does not grow with the age of the session.

    Fields of newer builds are kept, so that an older driver in between does not lose them.
    """

    version: int = SESSION.version
    session_id: str
    agent: str
    # The model of the last reply. A label for people; no decision depends on it.
    model: str | None = None
    mode: Mode = "conversation"
    capabilities: Capabilities = Capabilities()
    token_hash: str
    # Replaced tokens: deliveries that were accepted with one of them may still arrive.
    retired: tuple[str, ...] = ()
    # The number of the next turn.
    turn: int = 0
    # The same as readers count it: a turn without events does not count. Older drivers do not set it. Both differ only
    # after such a turn of a run that began before the patch `silent-turns-keep-their-number`.
    told: int | None = None
    inbox: tuple[DeliveryRef, ...] = ()
    seen: tuple[str, ...] = ()
    snapshot: Snapshot = Snapshot()
    # The open input requests.
    open: tuple[OpenInput, ...] = ()
    # The cancel request: "this" is the turn that runs, waits or begins next; "next" is the one after it.
    cancel: Cancel | None = None
    # The held turn, how often it was tried, and when it is started again (seconds since the epoch).
    held: JsonObject | None = None
    tries: int = 0
    retry_at: float | None = None
    # How many events the session had when its last turn ended.
    head: int | None = None
    # Set if the state must be derived from the store first.
    rebuild: Rebuild | None = None
    # When this run began, if it began to find a build that can read all of the inbox (seconds since the epoch).
    looked_at: float | None = None
    bounds: Bounds | None = None
    # How the next turn runs: "inline", or as a child workflow.
    turns: str | None = None
    # When the last turn ended or the last delivery arrived (seconds since the epoch), if the session may end for that.
    idle_since: float | None = None
    # The session that has started this one.
    parent: ParentRef | None = None
    # What a turn has handed to other sessions.
    awaited: Awaited | None = None
    # When the first and the newest message arrived that wait to be collected (seconds since the epoch). Runs that began
    # before there was such a wait do not set it.
    collecting: tuple[float, float] | None = None
    # Whether another server waits for the end of this session. If a rebuild has forgotten it, the APIs report it.
    calls_back: bool = False

    @classmethod
    def to_rebuild(cls, session_id: str, rebuild: Rebuild) -> "SessionState":
        """What a driver begins with that first has to derive its state from the store."""
        return cls(session_id=session_id, agent="", token_hash="", rebuild=rebuild)

    @property
    def next_reader_turn(self) -> int:
        return self.turn if self.told is None else self.told

    def with_delivery(self, delivery: DeliveryRef, *, in_order: bool = True) -> "SessionState":
        """Queue a delivery once, after those that were accepted before it."""
        if delivery.id in self.seen or any(each.id == delivery.id for each in self.inbox):
            return self
        return self._queued(delivery, in_order=in_order)

    def is_changed(self, delivery: DeliveryRef) -> bool:
        """Whether its sender has moved this delivery since it was queued, or has given it another mode."""
        known = next((each for each in self.inbox if each.id == delivery.id), None)
        if known is None or delivery.edits <= known.edits:
            return False
        return (delivery.mode, delivery.coalesce, delivery.order) != (known.mode, known.coalesce, known.order)

    def with_change(self, delivery: DeliveryRef) -> "SessionState":
        """Queue a delivery again that was changed while it waits."""
        return self.without(delivery)._queued(delivery)

    def _queued(self, delivery: DeliveryRef, *, in_order: bool = True) -> "SessionState":
        place = len(self.inbox)
        while in_order and place > 0 and _accepted_after(self.inbox[place - 1], delivery):
            place -= 1
        return self.model_copy(
            update={
                "inbox": (*self.inbox[:place], delivery, *self.inbox[place:]),
                "seen": _remembered(*self.seen, delivery.id),
            }
        )

    @property
    def has_room(self) -> bool:
        """Whether one more delivery of an unknown kind can be kept."""
        return sum(map(is_unknown, self.inbox)) < _MOST_UNKNOWN

    def is_out_of_order(self, delivery: DeliveryRef) -> bool:
        """Whether the inbox already holds a delivery that was accepted later."""
        return any(_accepted_after(each, delivery) for each in self.inbox)

    def without(self, *deliveries: DeliveryRef) -> "SessionState":
        taken = {delivery.id for delivery in deliveries}
        return self.model_copy(update={"inbox": tuple(each for each in self.inbox if each.id not in taken)})

    def reminded(self, request: OpenInput) -> "SessionState":
        """The state without the request's first reminder, which was sent."""
        later = request.model_copy(update={"remind_at": request.remind_at[1:]})
        return self.model_copy(update={"open": tuple(later if each is request else each for each in self.open)})

    @property
    def idle_end(self) -> float | None:
        """When the session ends if nothing happens until then."""
        seconds = self.bounds.idle_seconds if self.bounds else None
        return None if seconds is None or self.idle_since is None else self.idle_since + seconds

    def active(self, now: float) -> "SessionState":
        """The state after something has happened in the session."""
        bounded = self.bounds is not None and self.bounds.idle_seconds is not None
        return self.model_copy(update={"idle_since": now}) if bounded else self

    def withdrawn(self) -> "SessionState":
        """The state without open requests."""
        return self.model_copy(update={"open": (), "cancel": None})

    def cancelled(self, cancel: Cancel | None) -> "SessionState":
        return self.model_copy(update={"cancel": cancel})

    def holding(
        self, request: JsonObject, token_hash: str | None, now: float, retired: tuple[str, ...] = ()
    ) -> "SessionState":
        """Hold a turn that could not run. The pause doubles with each try."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self.tries, 16))
        held = {"held": request, "tries": self.tries + 1, "retry_at": now + pause}
        return self.model_copy(update=held)._with_token(token_hash, retired)

    @property
    def awaits_children(self) -> bool:
        """Whether the turn goes on when its children are done; without an answer of people, no other turn begins."""
        return self.awaited is not None and self.awaited.request is not None

    @property
    def results(self) -> tuple[DeliveryRef, ...]:
        """The deliveries that bring results for which a turn waits; the first one for each action."""
        keys = () if self.awaited is None else self.awaited.keys
        first = {each.action: each for each in reversed(self.inbox) if each.kind == CHILD_RESULT}
        return tuple(first[key] for key in keys if key in first)

    @property
    def asking(self) -> tuple[DeliveryRef, ...]:
        """The deliveries about requests of descendants that begin no turn: what is open is shown, the others go."""
        known = {each.request_id for each in self.open}
        return tuple(
            each
            for each in self.inbox
            if each.kind == CHILD_INPUT or (each.kind == CHILD_ANSWER and each.request_id not in known)
        )

    def due(self) -> "SessionState":
        """Start a held turn again at once."""
        return self if self.held is None else self.model_copy(update={"retry_at": 0.0})

    def after_turn(self, result: TurnResult, *, counts_silent: bool = False) -> "SessionState":
        """Take over the result of a turn: its snapshot, its open requests and the session's new token, if any.

        The number of a turn without events is used again, so that drivers and readers count alike. Runs that began
        before this rule counted such turns (`counts_silent`).
        """
        told = self.next_reader_turn if result.silent else self.turn + 1
        # The cancel request may arrive while the turn parks, and the turn misses it: the driver withdraws its requests.
        cancel = "this" if self.cancel == "next" or (self.cancel == "this" and result.open) else None
        turn = self.turn if result.silent and not counts_silent else self.turn + 1
        done = {"turn": turn, "told": told, "snapshot": result.snapshot, "open": result.open, "cancel": cancel}
        # Only a rebuild lowers it: a store with fewer events was restored from an older copy.
        head = max((known for known in (self.head, result.head) if known is not None), default=None)
        known = {"head": head, "turns": result.turns or self.turns, "awaited": self._awaited_after(result)}
        state = self.model_copy(update={**done, **known, "held": None, "tries": 0, "retry_at": None})
        return state._with_token(result.token_hash, result.retired)

    def _awaited_after(self, result: TurnResult) -> Awaited | None:
        """What a turn still waits for after another one that continued it has ended."""
        if self.awaited is None or result.open or result.silent:
            return self.awaited
        return self.awaited.model_copy(update={"request": None, "phase": "abandoned"})

    def rebuilt(self, found: "SessionState") -> "SessionState":
        """The state that was read from the store, with the deliveries that have arrived since."""
        for delivery in self.inbox:
            found = found.with_delivery(delivery)
        return found.model_copy(update={"collecting": self.collecting})

    def _with_token(self, token_hash: str | None, retired: tuple[str, ...]) -> "SessionState":
        """Set the session's token. The previous one and those in between become replaced tokens."""
        if token_hash is None:
            return self
        before = dict.fromkeys((*self.retired, self.token_hash, *retired))
        kept = tuple(each for each in before if each != token_hash)[-_RETIRED:]
        return self.model_copy(update={"token_hash": token_hash, "retired": kept})


def _remembered(*ids: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))[-REMEMBERED_DELIVERIES:]


def _accepted_after(one: DeliveryRef, other: DeliveryRef) -> bool:
    """Whether the one comes later in the queue: it was accepted later, or was moved there."""
    place, others = one.order or one.at, other.order or other.at
    return place is not None and others is not None and place > others


def read_delivery(data: Any) -> DeliveryRef | None:
    """The payload of a signal as a delivery; None if it is none."""
    try:
        delivery = DeliveryRef.model_validate(data)
    except ValidationError:
        return None
    if delivery.model_extra and not can_be_kept(data):
        delivery = DeliveryRef.model_validate(delivery.model_dump(include=set(DeliveryRef.model_fields)))
    # No API sends anything else. A refusal of an id that no store can look up would be retried for ever.
    kind = delivery.kind.removeprefix(UNKNOWN)
    how = (delivery.mode or "", delivery.lane, delivery.order or "", delivery.supersedes or "")
    texts = (delivery.id, kind, delivery.token_hash, delivery.traceparent or "", delivery.at or "", *how)
    return delivery if delivery.id and all(len(text) <= _LONGEST and text.isprintable() for text in texts) else None


def can_be_kept(data: Any) -> bool:
    """Whether the payload is small enough to be carried over to a newer build, which may be able to read it."""
    try:
        return not deeper_than(data, DEEPEST) and len(json.dumps(data)) <= _LARGEST
    except (TypeError, ValueError):
        return False


def is_unknown(delivery: DeliveryRef) -> bool:
    """Whether only a newer build can read this delivery. It stays in the inbox, and others overtake it."""
    return delivery.kind not in KINDS or delivery.version not in REFERENCE_VERSIONS


def with_unknown_prefix(delivery: DeliveryRef, *, unknown: bool) -> DeliveryRef:
    """The delivery with or without the mark of an unknown kind."""
    bare = delivery.kind.removeprefix(UNKNOWN)
    kind = UNKNOWN + bare if unknown else bare
    return delivery if kind == delivery.kind else delivery.model_copy(update={"kind": kind})


class _OfTurn(Wire):
    turn_id: str = Field(pattern=r"^turn_\d{1,9}$")


def read_turn_number(data: Any) -> int | None:
    """The number of the turn that a signal names, if any."""
    try:
        return int(_OfTurn.model_validate(data).turn_id.removeprefix("turn_"))
    except ValidationError:
        return None


class RepairOrder(Wire):
    """The payload of the repair signal; `reason` is used by a rebuild."""

    how: Repair
    reason: str = "OPERATOR"


def read_repair(data: Any) -> RepairOrder | None:
    """The payload as a repair order; None if this build does not know it."""
    try:
        return RepairOrder.model_validate(data)
    except ValidationError:
        return None


#: Set in a state that a build could not read. The build that can read it clears the session's attention.
WAS_UNREADABLE = "wasUnreadable"


def load_session(
    data: JsonObject,
    reads: Callable[[DeliveryRef], bool] = lambda delivery: not is_unknown(delivery),
    reads_version: Callable[[int], bool] = lambda version: True,
) -> SessionState:
    """Read the driver's state, in whatever version it was written.

    `reads` and `reads_version`: whether this run reads a delivery, and a version of the state after the first.
    """
    data = {name: value for name, value in data.items() if name != WAS_UNREADABLE}
    version = data.get("version", 1)
    lifted = SESSION.lift(version, data)
    if version > 1 and not reads_version(version):
        raise UnreadableState("This run began on a build that could not read the session state.", version=version)
    try:
        state = SessionState.model_validate(_with_deliveries({**lifted, "version": SESSION.version}))
    except ValidationError as invalid:
        raise UnreadableState("The session state cannot be read.", problems=invalid.error_count()) from None
    # While the state was unreadable, signals were added to the inbox unchecked, so it may hold duplicates.
    first = {delivery.id: delivery for delivery in reversed(state.inbox)}
    inbox = tuple(
        with_unknown_prefix(each, unknown=not reads(with_unknown_prefix(each, unknown=False)))
        for each in state.inbox
        if first[each.id] is each
    )
    return state.model_copy(update={"inbox": inbox, "seen": _remembered(*state.seen, *first)})


def _with_deliveries(data: JsonObject) -> JsonObject:
    """Drop the signals in the inbox that are no deliveries. Real deliveries are in the store as well."""
    if not isinstance(inbox := data.get("inbox"), list):
        return data
    return {**data, "inbox": [each for each in cast("list[Any]", inbox) if read_delivery(each)]}


class TurnState(Wire):
    """The snapshot that one turn leaves for the next. Opaque to the driver, which may be older than the turn."""

    usage: Usage = Usage()
    steps: int = 0
    failed_turns: int = 0
    # Fields of newer builds: kept, so that an older turn in between does not lose them.
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])

    def after_step(self, usage: Usage) -> "TurnState":
        return self.model_copy(update={"usage": self.usage + usage, "steps": self.steps + 1})

    def after_failure(self) -> "TurnState":
        return self.model_copy(update={"failed_turns": self.failed_turns + 1})


def load_turn(snapshot: Snapshot) -> TurnState:
    data = SNAPSHOT.lift(snapshot.version, snapshot.data)
    known = {key: value for key, value in data.items() if key in _TURN_FIELDS}
    unknown = {key: value for key, value in data.items() if key not in _TURN_FIELDS}
    try:
        return TurnState.model_validate({**known, "extra": unknown})
    except ValidationError as invalid:
        raise UnreadableState("The turn snapshot cannot be read.", problems=invalid.error_count()) from None


def dump_turn(state: TurnState) -> Snapshot:
    data = state.model_dump(mode="json", exclude={"extra"})
    return Snapshot(version=SNAPSHOT.version, data={**state.extra, **data})


_TURN_FIELDS = frozenset(field.alias or name for name, field in TurnState.model_fields.items() if name != "extra")


def derive_token(secret: bytes, session_id: str) -> str:
    """The default token of a session. It cannot be guessed without the secret; a repeated request gets the same one."""
    digest = hmac.new(secret, b"continuation-token/" + session_id.encode(), hashlib.sha256).hexdigest()
    return f"eve:{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:48]}"


def owned_token(owner: str, agent: str, name: str) -> str:
    """The token of the session that tools and runs of this owner know by a name. As JSON no two names are alike."""
    return json.dumps(["run", owner, agent, name])


def hash_token(token: str) -> str:
    """The raw token is a secret: the store and Temporal see its hash only."""
    return hashlib.sha256(b"perdure/route/" + token.encode(errors="surrogatepass")).hexdigest()
