"""Input requests and answers as the store keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.protocol.deliveries import Principal
from perdure.protocol.inputs import InputAnswer, InputKind, InputRequest, InputStatus

from .deliveries import DeliveryRow, NewDelivery


@dataclass(frozen=True)
class InputRow:
    """An input request of a session and its current state."""

    request: InputRequest
    status: InputStatus
    opened_at: str
    # The owner of the session.
    requester: Principal
    # All votes in order; `answer` is the one that closed the request.
    votes: Sequence[InputAnswer] = ()
    answer: InputAnswer | None = None
    closed_at: str | None = None
    # The delivery that carries the answer to the session. When the same answer is repeated, it is signalled again.
    delivery_id: str | None = None


@dataclass(frozen=True)
class Waits:
    """What a session waits for: open requests (a root, those of its family), or deliveries that no turn has read."""

    inputs: Sequence[InputRow] = ()
    queued: int = 0


@dataclass(frozen=True)
class Vote:
    """One principal's answer to one request. The caller has checked that the principal may answer."""

    request_id: str
    answer: InputAnswer
    # It closes the request regardless of earlier votes, also of the same principal.
    ends: bool = False


@dataclass(frozen=True)
class Answering:
    """The votes of one caller, written in one transaction with the delivery that carries them to the session."""

    session_id: str
    votes: Sequence[Vote]
    # Written when a vote closed a request, and in the cases below.
    delivery: NewDelivery
    # Write the delivery in any case.
    always: bool = False
    # Write the delivery also when a vote came too late for its request.
    late: bool = False


@dataclass(frozen=True)
class Answered:
    """The current rows of the requests, in the order of the votes, and the ids of those that these votes closed."""

    rows: Sequence[InputRow]
    closed: frozenset[str]
    # The new delivery, or the first one under the same idempotency key.
    delivery: DeliveryRow | None
    fresh: bool
    # The workflow may not have received earlier deliveries.
    unsignalled: bool = False


@dataclass(frozen=True)
class InputQuery:
    """One page of requests, oldest first."""

    session_id: str | None = None
    # Those of this session and of all of its descendants; it is a root.
    root: str | None = None
    agent: str | None = None
    kind: InputKind | None = None
    status: InputStatus | None = "open"
    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True)
class InputPage:
    rows: Sequence[InputRow]
    next_cursor: str | None = None
