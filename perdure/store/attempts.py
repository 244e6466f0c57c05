"""Attempts as the store reports them: who works or has worked at what, until when, and how it has ended.

This is a report, and nothing is decided by it: the fence decides who may write, and Temporal who works.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from perdure.bounds import public, whole
from perdure.errors import PerdureError, Superseded, ToolFailed, TurnCancelled, Unavailable
from perdure.protocol.events import Usage
from perdure.protocol.wire import JsonObject
from perdure.store.deliveries import DeliveryRow

#: `timed_out`: its lease expired and no other attempt followed; `superseded`: another one has taken over.
AttemptStatus: TypeAlias = Literal["running", "succeeded", "failed", "timed_out", "cancelled", "superseded"]

#: What an attempt says of its own end.
AttemptEnd: TypeAlias = Literal["succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class AttemptKey:
    """An attempt in its session: its scope, and its generation there."""

    turn: int
    step: int
    scope: str
    generation: int


@dataclass(frozen=True)
class AttemptReport:
    """What is noted of an attempt with a commit, whoever holds its scope by now. The first end counts."""

    key: AttemptKey
    # None: it goes on, or how it has ended is noted elsewhere.
    status: AttemptEnd | None = None
    # `{type, message}`, without content and secrets.
    error: JsonObject | None = None


def error_of(type: str, message: str) -> JsonObject:
    """An error as reports show it: the text of a tool or a provider is cut, and looked through for secrets."""
    return {"type": type, "message": public(whole(message))}


def stopped(key: AttemptKey) -> AttemptReport:
    """The report of an attempt that was asked to stop."""
    return AttemptReport(key, "cancelled", error_of("CANCELLED", "its work was stopped"))


def failed_with(key: AttemptKey, error: BaseException) -> AttemptReport | None:
    """The report of an attempt that ends with this error; None if it is not known here how it has ended."""
    match error:
        case Superseded() | Unavailable():
            # Whoever has taken over has noted that, and a database that is away notes nothing.
            return None
        case asyncio.CancelledError():
            return stopped(key)
        case TurnCancelled():
            return AttemptReport(key, "cancelled", error_of(error.code, error.message))
        case ToolFailed():
            return AttemptReport(key, "failed", error_of(error.code, error.reason or error.message))
        case PerdureError():
            return AttemptReport(key, "failed", error_of(error.code, error.message))
        case _:
            # Its text may hold content.
            return AttemptReport(key, "failed", error_of(type(error).__name__, "the worker's log has the rest"))


@dataclass(frozen=True)
class AttemptRow:
    session_id: str
    key: AttemptKey
    # In the order in which the attempts of a scope began.
    number: int
    attempt_id: str
    # host:pid:build
    worker: str
    started_at: str
    # The last heartbeat that is noted, and the heartbeat timeout.
    lease_expires_at: str
    status: AttemptStatus
    ended_at: str | None = None
    error: JsonObject | None = None
    usage: Usage = field(default_factory=Usage)
    # In billionths of a dollar; 0: not known.
    cost: int = 0


@dataclass(frozen=True)
class AttemptQuery:
    """The attempts of a session, ordered by turn, step, scope and number."""

    session_id: str
    turn: int | None = None
    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True)
class AttemptPage:
    attempts: Sequence[AttemptRow]
    next_cursor: str | None = None


@dataclass(frozen=True)
class Earlier:
    """The attempt before another one in its scope."""

    attempt_id: str
    status: AttemptStatus
    error: JsonObject | None = None


@dataclass(frozen=True)
class Happened:
    """What has happened to a session in some time, beside its events."""

    # Attempts that began or ended, each with the one before it.
    attempts: Sequence[tuple[AttemptRow, Earlier | None]]
    # Deliveries that were accepted, or read by a turn; without their bodies.
    deliveries: Sequence[DeliveryRow]
    # False: there was more than was asked for.
    complete: bool = True


@dataclass(frozen=True)
class Backlog:
    """How much runs and waits now, in all sessions. No number is greater than the bound that was asked for."""

    # By the status of the session.
    sessions: Mapping[str, int]
    in_need: int
    open_inputs: int
    # Deliveries that no turn has read.
    deliveries: int


class AttemptStore(Protocol):
    """The reports. They are written with the commits of the attempts, and these are the rest."""

    async def renew(self, session_id: str, key: AttemptKey, seconds: float) -> None:
        """Note that the lease of a running attempt expires in so many seconds."""
        ...

    async def report(self, session_id: str, report: AttemptReport) -> None:
        """Note how an attempt has ended that had nothing more to commit."""
        ...

    async def list(self, query: AttemptQuery) -> AttemptPage: ...

    async def leases(self, limit: int, cursor: str | None = None) -> AttemptPage:
        """The attempts that run, of all sessions, oldest first."""
        ...

    async def backlog(self, most: int) -> Backlog:
        """How much runs and waits now; what is more than `most` counts as `most`."""
        ...

    async def happened(self, session_id: str, since: str, until: str | None, limit: int) -> Happened:
        """What has happened from `since` on and before `until`; None: up to now."""
        ...

    async def forget(self, older_than: float, limit: int) -> int:
        """Delete rows of attempts that began so many seconds ago and run no more; returns how many."""
        ...
