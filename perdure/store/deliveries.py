"""Deliveries as the store keeps them, from their acceptance to their end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from perdure.protocol.deliveries import MAIN, Overflow
from perdure.protocol.wire import JsonObject


@dataclass(frozen=True)
class NewDelivery:
    """A delivery to accept. `body` is `DeliveryBody` as JSON."""

    session_id: str
    delivery_id: str
    body: JsonObject
    # The owner of the idempotency key. Each owner has its own keys.
    owner: str
    idempotency_key: str | None = None
    # The digest of the whole request. It decides whether a request with a known key is a repetition.
    digest: str | None = None
    # The signal's payload (`DeliveryRef` as JSON), kept so that any process can signal it again.
    ref: JsonObject | None = None
    # How many deliveries may wait in the session. When so many wait already, this one is not accepted.
    limit: int | None = None
    overflow: Overflow = "reject"
    lane: str = MAIN
    # What its message does while the session is busy. None: it is no message.
    mode: str | None = None


#: `withdrawn`: by its sender, before a turn has read it; `superseded`: by a later message; `refused`: no turn will read
#: it, for another reason.
DeliveryOutcome: TypeAlias = Literal["completed", "failed", "cancelled", "refused", "withdrawn", "superseded"]


DeliveryStatus: TypeAlias = Literal["queued", "running", "settled"]


@dataclass(frozen=True)
class DeliveryRow:
    session_id: str
    delivery_id: str
    # None after a turn has read the delivery: the journal has its content then.
    body: JsonObject | None
    # The turn that read it.
    turn: int | None
    # Why no turn will read it: a code.
    refused: str | None
    accepted_at: str
    kind: str = "message"
    ref: JsonObject | None = None
    # When a turn has read it; None also where an older build has done that.
    started_at: str | None = None
    settled_at: str | None = None
    # What became of it; None: nothing yet, or only the events know.
    outcome: DeliveryOutcome | None = None
    error: JsonObject | None = None
    # How often it was changed.
    edits: int = 0
    lane: str = MAIN
    mode: str | None = None
    # Its place in the queue, if it was moved: it sorts with the `accepted_at` of the others.
    moved_to: str | None = None
    # The turn that has settled it.
    answered_by: int | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Where it waits: the queue is sorted by this."""
        return self.moved_to or self.accepted_at, self.delivery_id

    @property
    def unread(self) -> bool:
        """Whether a turn may still read it."""
        return self.turn is None and self.refused is None


@dataclass(frozen=True)
class Change:
    """What becomes of a delivery that waits. None: it stays as it is."""

    body: JsonObject | None = None
    mode: str | None = None
    # Its place in the queue, from 1.
    position: int | None = None


@dataclass(frozen=True)
class DeliveryQuery:
    """The deliveries of a session, newest first."""

    session_id: str
    status: DeliveryStatus | None = None
    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True)
class DeliveryPage:
    deliveries: Sequence[DeliveryRow]
    next_cursor: str | None = None


@dataclass(frozen=True)
class Accepted:
    """An accepted delivery: the new one, or the first one under the same idempotency key."""

    delivery: DeliveryRow
    fresh: bool
    # The workflow may not have received earlier deliveries.
    unsignalled: bool = False


@dataclass(frozen=True)
class Unsignalled:
    """A session whose workflow may not have received everything that was accepted."""

    session_id: str
    # When the newest of the waiting deliveries was accepted.
    newest: str | None = None
    # The turn that is to be stopped.
    cancel_turn: int | None = None
    # A process has tried to signal the workflow and failed.
    failed: bool = False


@dataclass(frozen=True)
class CancelRequest:
    """An accepted request to stop a turn."""

    session_id: str
    turn: int
    # If the turn has not begun: when the newest delivery was accepted that waited then. A turn of the same number that
    # only later ones begin is not meant.
    until: str | None = field(default=None, compare=False)
