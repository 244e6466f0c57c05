"""Values of what happens to whole sessions: forks, restores, deletions, files of exports, failed turns, callbacks."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, cast

from pydantic import Field, ValidationError

from perdure.bounds import DEEPEST, deeper_than
from perdure.errors import Invalid
from perdure.protocol.deliveries import Bounds, Capabilities, Mode, Principal
from perdure.protocol.wire import JsonObject, Wire

from .deliveries import NewDelivery
from .values import NewRecord, Slot

#: The format of the record that keeps code without forks from serving a fork.
FORK = "perdure/fork/1"


@dataclass(frozen=True)
class NewFork:
    """A session to create that shares the turns of another one up to `turn`, with that turn or its first steps."""

    session_id: str
    token_hash: str
    parent: str
    turn: int
    # Carries the idempotency key of the request; no turn reads it.
    delivery: NewDelivery | None = None
    bounds: Bounds | None = None
    # The step that the caller has named.
    step: int | None = None
    # The record that ends the last turn after that step. None: the step is the last one, so the whole turn is shared.
    cut: NewRecord | None = None
    # It is this lane of its parent.
    lane: str | None = None


@dataclass(frozen=True)
class Forked:
    """The new fork, or the first one under the same idempotency key."""

    session_id: str
    fresh: bool


@dataclass(frozen=True)
class Restoration:
    """Later prompts leave out the turns after `kept`, and the state slots are as they were at its end."""

    session_id: str
    reason: str
    # None: prompts begin with the turn that comes next or runs, and the slots stay.
    kept: int | None = None


def leaves_out(left_out: Sequence[tuple[int, int]], turn: int) -> bool:
    """Whether prompts leave this turn out."""
    return any(first <= turn < until for first, until in left_out)


def left_out_up_to(left_out: Sequence[tuple[int, int]], last: int) -> list[tuple[int, int]]:
    """The ranges up to a turn, with that turn."""
    return [(first, min(until, last + 1)) for first, until in left_out if first <= last]


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


# --- retention ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keep:
    """For how many seconds content is kept; None: for as long as its session. Deltas go first, and records last."""

    deltas: float | None = None
    messages: float | None = None
    records: float | None = None

    @property
    def shortest(self) -> float | None:
        return min((each for each in (self.deltas, self.messages, self.records) if each is not None), default=None)


# --- exports ------------------------------------------------------------------------------------------------

EXPORT_FORMAT = "perdure/session"
EXPORT_VERSION = 1

#: The longest line in bytes: a record may hold files. The most commas and brackets in it, which bound the values that
#: it is read into, and the deepest line: a reply is nested deeper than a value, in a body and a line. The state of an
#: author may be as deep as serialisers can write.
_LONGEST_LINE = 256 * 1024 * 1024
_MOST_MARKS = 2_000_000
_DEEPEST_LINE = DEEPEST + 60
_DEEPEST_SLOT = 260
_LARGEST_NUMBER = 2**53

W = TypeVar("W", bound=Wire)


class ExportHeader(Wire):
    """The first line of an export."""

    kind: Literal["session"] = "session"
    format: str = EXPORT_FORMAT
    version: int = EXPORT_VERSION
    # Each export has another one: a file is imported once.
    export_id: str = Field(min_length=1, max_length=100)
    exported_at: str
    agent: str = Field(min_length=1, max_length=255)
    mode: Mode
    capabilities: Capabilities
    principal: Principal
    title: str | None = None
    turns: int = Field(ge=1, lt=_LARGEST_NUMBER)
    left_out: tuple[tuple[int, int], ...] = ()


class ExportedSlot(Wire):
    kind: Literal["slot"] = "slot"
    name: str = Field(max_length=1_000)
    value: JsonObject | None
    version: int = Field(ge=1, lt=_LARGEST_NUMBER)


class ExportedRecord(Wire):
    kind: Literal["record"] = "record"
    turn: int = Field(ge=0, lt=_LARGEST_NUMBER)
    step: int = Field(ge=0, lt=_LARGEST_NUMBER)
    key: str = Field(max_length=1_000)
    format: str = Field(max_length=255)
    body: JsonObject
    at: str = ""

    @property
    def record(self) -> NewRecord:
        return NewRecord(self.turn, self.step, self.key, self.format, self.body)


class ExportEnd(Wire):
    """The last line. Without it, or with another digest of the lines before it, a file is not imported."""

    kind: Literal["end"] = "end"
    slots: int
    records: int
    # The turns that have no records: older versions gave turns without events a number.
    silent: tuple[int, ...] = ()
    sha256: str


class ExportWriter:
    """Makes the lines of an export: the header, the slots, the records in order, and the end."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._counts = {"slot": 0, "record": 0}

    def line(self, value: ExportHeader | ExportedSlot | ExportedRecord) -> bytes:
        if value.kind != "session":
            self._counts[value.kind] += 1
        line = _line(value)
        self._digest.update(line)
        return line

    def end(self, silent: Sequence[int] = ()) -> bytes:
        slots, records = self._counts["slot"], self._counts["record"]
        end = ExportEnd(slots=slots, records=records, silent=tuple(silent), sha256=self._digest.hexdigest())
        return _line(end)


def _line(value: Wire) -> bytes:
    # ASCII only: a body may hold half a surrogate pair.
    return json.dumps(value.model_dump(), separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Export:
    """A file that was read to its end, and is complete."""

    path: Path
    header: ExportHeader
    slots: Sequence[Slot]
    sha256: str

    def records(self) -> Iterator[NewRecord]:
        """The records again, one at a time."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                data = _json(self.path, number, line)
                if data.get("kind") == "record":
                    yield _read(self.path, number, data, ExportedRecord).record


Check: TypeAlias = Callable[[ExportHeader, int, Sequence[NewRecord]], None]


def read_export(path: Path, check: Check) -> Export:
    """Read a file to its end, or raise `Invalid`. `check` gets the records of each turn."""
    digest, number = hashlib.sha256(), 0
    reader: _ExportReader | None = None
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            number += 1
            data = _json(path, number, line)
            if reader is None:
                reader = _ExportReader(path, _header(path, data), check)
            elif data.get("kind") == "end":
                reader.end(_read(path, number, data, ExportEnd), digest.hexdigest())
                if file.read(1):
                    raise Invalid(f"{path} goes on after its end: line {number} is the last one of an export.")
                return Export(path, reader.header, reader.slots, digest.hexdigest())
            else:
                reader.take(number, data)
            digest.update(line)
    if reader is None:
        raise Invalid(f"{path} is empty.")
    raise Invalid(f"{path} is incomplete: it ends after line {number}.")


class _ExportReader:
    """What was read of a file so far. It keeps the records of one turn."""

    def __init__(self, path: Path, header: ExportHeader, check: Check) -> None:
        self.header = header
        self.slots: list[Slot] = []
        self._path = path
        self._check = check
        self._turn: list[NewRecord] = []
        # The turn before that.
        self._last: int | None = None
        # How many turns have records.
        self._turns = 0
        self._records = 0

    def take(self, number: int, data: JsonObject) -> None:
        match data.get("kind"):
            case "slot" if not self._records:
                slot = _read(self._path, number, data, ExportedSlot)
                if self.slots and slot.name <= self.slots[-1].name:
                    raise self._out_of_order(number)
                self.slots.append(Slot(slot.name, slot.value, slot.version))
            case "record":
                self._take_record(number, _read(self._path, number, data, ExportedRecord).record)
            case _:
                raise Invalid(f"{self._path}: line {number} has no kind that belongs there.")

    def _take_record(self, number: int, record: NewRecord) -> None:
        if self._turn:
            last = self._turn[-1]
            if (record.turn, record.step, record.key) <= (last.turn, last.step, last.key):
                raise self._out_of_order(number)
            if record.turn != last.turn:
                self._check(self.header, last.turn, self._turn)
                self._last, self._turn = last.turn, []
        if not self._turn and record.turn < self.header.turns:
            self._turns += 1
        self._turn.append(record)
        self._records += 1

    def end(self, end: ExportEnd, digest: str) -> None:
        if (end.slots, end.records, end.sha256) != (len(self.slots), self._records, digest):
            raise Invalid(f"{self._path} was changed since it was exported, or is damaged.")
        if self._turn:
            self._check(self.header, self._turn[-1].turn, self._turn)
        # The last turn may be followed by what was done to the model's history after it.
        if self.header.turns - 1 not in (self._last, self._turn[-1].turn if self._turn else None):
            raise Invalid(f"{self._path}: the records of the last turn are missing.")
        if self._turns + len(set(end.silent)) != self.header.turns:
            raise Invalid(f"{self._path}: it has the records of {self._turns} of {self.header.turns} turns.")

    def _out_of_order(self, number: int) -> Invalid:
        return Invalid(f"{self._path}: line {number} repeats another one, or is out of order.")


def _json(path: Path, number: int, line: bytes) -> JsonObject:
    if not line.endswith(b"\n"):
        if len(line) == _LONGEST_LINE:
            raise Invalid(f"{path}: line {number} is longer than {_LONGEST_LINE} bytes.")
        raise Invalid(f"{path} is incomplete: line {number} has no end." if number > 1 else _foreign(path))
    # Before it is read: each value takes up to a hundred times the bytes of its text.
    if line.count(b",") + line.count(b"[") + line.count(b"{") > _MOST_MARKS:
        raise Invalid(f"{path}: line {number} has too many values.")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise Invalid(f"{path}: line {number} cannot be read." if number > 1 else _foreign(path))
    found = cast("JsonObject", data)
    deepest = _DEEPEST_SLOT if found.get("kind") == "slot" else _DEEPEST_LINE
    if deeper_than(found, deepest):
        raise Invalid(f"{path}: line {number} is nested deeper than {deepest} levels.")
    return found


def _header(path: Path, data: JsonObject) -> ExportHeader:
    if data.get("format") != EXPORT_FORMAT:
        raise Invalid(_foreign(path))
    if data.get("version") != EXPORT_VERSION:
        raise Invalid(
            f"{path} has version {data.get('version')!r} of the format; this version of Perdure reads {EXPORT_VERSION}."
        )
    header = _read(path, 1, data, ExportHeader)
    last = 0
    for first, until in header.left_out:
        if not last <= first < until <= header.turns:
            raise Invalid(f"{path}: line 1 cannot be read: it leaves out turns that are none, or not in order.")
        last = until
    return header


def _foreign(path: Path) -> str:
    return f"{path} is no export of a session."


def _read(path: Path, number: int, data: JsonObject, shape: type[W]) -> W:
    try:
        value = shape.model_validate(data)
    except ValidationError:
        raise Invalid(f"{path}: line {number} cannot be read.") from None
    names = [getattr(value, name, "") for name in ("key", "format", "name", "agent", "export_id")]
    if not all(name.isprintable() for name in names):
        raise Invalid(f"{path}: line {number} has a name that cannot be stored.")
    return value


@dataclass(frozen=True)
class NewImport:
    """A session to create from an export."""

    session_id: str
    token_hash: str
    export: Export
    # Who owns it.
    principal: Principal
    # Holds the id of the export, so that a file is imported once; None: it may be imported again.
    delivery: NewDelivery | None = None
    # What bounds it in time from now on.
    bounds: Bounds | None = None


DeadLetterStatus: TypeAlias = Literal["open", "requeued"]


@dataclass(frozen=True)
class DeadLetter:
    """A turn that failed. Every commit with the event of a failed turn leaves one."""

    session_id: str
    turn: int
    agent: str
    code: str
    message: str
    failed_at: str
    # When its messages were delivered again.
    requeued_at: str | None = None


@dataclass(frozen=True)
class DeadLetterQuery:
    """One page of dead letters, newest first."""

    owner: str | None = None
    agent: str | None = None
    status: DeadLetterStatus = "open"
    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True)
class DeadLetterPage:
    dead_letters: Sequence[DeadLetter]
    next_cursor: str | None = None


# --- other servers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DueCallback:
    """The callback of a session that has ended, for one try to deliver it."""

    session_id: str
    # `{callId, subagentName, token, url}`. A secret.
    callback: JsonObject = field(repr=False)
    # The number of this try.
    tries: int
    # When the session has ended.
    since: str


@dataclass(frozen=True)
class CallbackStatus:
    """How far the callback of a session is."""

    tries: int
    # When the session has ended, and how the callback was settled.
    since: str | None
    settled: str | None


@dataclass(frozen=True)
class NewRemoteCall:
    """A call of a session that an agent on another server is to do. `token_hash`: of the token for its callback."""

    session_id: str
    action: str
    state: JsonObject
    token_hash: str | None = None


@dataclass(frozen=True)
class RemoteCall:
    """The same, as far as it is known. Only the harness reads `state`."""

    session_id: str
    action: str
    state: JsonObject
    begun_at: str
    # Whether its result was accepted.
    ended: bool
