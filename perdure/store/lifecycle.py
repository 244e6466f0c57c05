"""Values of what happens to whole sessions: forks and deletions. Frozen, no I/O."""

import hashlib
from dataclasses import dataclass

from perdure.protocol.wire import JsonObject

from .values import NewDelivery

#: The format of the record that keeps code without forks from serving a fork.
FORK = "perdure/fork/1"


@dataclass(frozen=True)
class NewFork:
    """A session to create that shares the turns of another one up to `turn`, with that turn."""

    session_id: str
    token_hash: str
    parent: str
    turn: int
    # Carries the idempotency key of the request; no turn reads it.
    delivery: NewDelivery | None = None


@dataclass(frozen=True)
class Forked:
    """The new fork, or the first one under the same idempotency key."""

    session_id: str
    fresh: bool


@dataclass(frozen=True)
class Deletion:
    """What is left of a session that is being deleted, or was deleted."""

    session_id: str
    # Of the owner: nobody else may ask about it.
    owner_hash: str
    requested_at: str
    # None: some of it is still there.
    finished_at: str | None
    # How many rows of each kind were deleted, or handed over to forks.
    counts: JsonObject

    def belongs_to(self, owner: str) -> bool:
        return self.owner_hash == hash_owner(owner)


def hash_owner(owner: str) -> str:
    return hashlib.sha256(b"perdure/owner/" + owner.encode(errors="surrogatepass")).hexdigest()
