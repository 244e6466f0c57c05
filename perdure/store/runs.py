"""What the store keeps of runs beside what it keeps of every session: the read model of their callers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from perdure.protocol.wire import JsonObject

RunStatus: TypeAlias = Literal["active", "completed", "errored"]


@dataclass(frozen=True)
class NewRun:
    """A run to create, with the row of its session."""

    name: str
    # Any JSON value.
    input: Any = field(repr=False)
    trace_carrier: JsonObject | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run as its callers see it. In lists it has neither input nor result nor error."""

    run_id: str
    name: str
    status: RunStatus
    started_at: str
    ended_at: str | None = None
    duration_ms: int | None = None
    input: Any = field(default=None, repr=False)
    result: Any = field(default=None, repr=False)
    # `{name, message}`.
    error: JsonObject | None = None
    trace_carrier: JsonObject | None = None
    # What a run waits for that is parked.
    waiting_for: str | None = None
    # How often its function was entered.
    attempts: int = 0

    @property
    def ended(self) -> bool:
        """Whether it has completed or errored."""
        return self.status != "active"


@dataclass(frozen=True)
class RunChange:
    """What a commit changes in the record of a run. One that closes the session ends the run."""

    waiting_for: str | None = None
    # Whether its function is entered again.
    enters: bool = False
    # Of a run that is completed.
    result: Any = None


@dataclass(frozen=True)
class RunQuery:
    """One page of runs, newest first."""

    name: str | None = None
    status: RunStatus | None = None
    owner: str | None = None
    limit: int = 100
    # The start and the id of the last run of the page before.
    after: tuple[str, str] | None = None


@dataclass(frozen=True)
class RunPage:
    runs: Sequence[RunRecord]
    # Of the last run, if there are more.
    next: tuple[str, str] | None = None
