"""What a run records of the calls that its function makes, and what an attempt reads of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from perdure.harness.journal import RUN_BEGUN, RUN_SETTLED, read
from perdure.protocol.wire import JsonObject, Wire
from perdure.store.values import Record

Kind: TypeAlias = Literal["step", "sleep", "prompt", "dispatch", "ask"]


class Begun(Wire):
    """A call that was begun: of a step, the intent to do it."""

    kind: Kind
    attempt: int
    generation: int
    # When it was begun, and when a sleep is over, in seconds since the epoch.
    at: float
    due: float | None = None
    # The session that was started for a prompt, or the name of the one that gets it.
    child_session_id: str | None = None
    session: str | None = None
    request_id: str | None = None


class Settled(Wire):
    """The end of a call."""

    status: Literal["completed", "failed", "unknown"]
    value: Any = None
    # `{name, message}`: what was raised.
    error: JsonObject | None = None
    # The function sees the ends of its calls in this order, in each attempt.
    order: int = -1


@dataclass(frozen=True)
class Place:
    """A call of a run: its position among the calls, and what it is."""

    position: int
    kind: Kind
    name: str

    @property
    def label(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def begun_key(self) -> str:
        return f"begun/{self.label}"


@dataclass(frozen=True)
class Calls:
    """The calls that a run has recorded, by position."""

    labels: dict[int, str] = field(default_factory=dict[int, str])
    begun: dict[int, Begun] = field(default_factory=dict[int, Begun])
    settled: dict[int, Settled] = field(default_factory=dict[int, Settled])

    @property
    def open(self) -> dict[int, Begun]:
        """The calls that have not ended."""
        return {position: begun for position, begun in self.begun.items() if position not in self.settled}


def calls_of(records: Iterable[Record]) -> Calls:
    calls = Calls()
    for record in records:
        if RUN_BEGUN.includes(record):
            calls.begun[record.step] = read(record, RUN_BEGUN, Begun)
            calls.labels[record.step] = record.key.removeprefix("begun/")
        elif RUN_SETTLED.includes(record):
            calls.settled[record.step] = read(record, RUN_SETTLED, Settled)
            calls.labels[record.step] = record.key
    return calls
