"""Deliveries as the store keeps them, from their acceptance to their end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


#: `withdrawn`: by its sender, before a turn has read it; `refused`: no turn will read it.
DeliveryOutcome: TypeAlias = Literal["completed", "failed", "cancelled", "refused", "withdrawn"]


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
    # How often its content was changed.
    edits: int = 0

    @property
    def unread(self) -> bool:
        """Whether a turn may still read it."""
        return self.turn is None and self.refused is None


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
