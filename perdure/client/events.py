"""Events of a stream, and what a turn has said so far."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

Json = dict[str, Any]

WAITING, COMPLETED, FAILED = "session.waiting", "session.completed", "session.failed"
#: After one of these the session takes the next message, or has ended.
BOUNDARIES = frozenset({WAITING, COMPLETED, FAILED})
#: One of these is the last event of a session.
TERMINAL = frozenset({COMPLETED, FAILED})

#: The deltas: the field of the piece, and the one of all so far.
_DELTAS = {
    "message.appended": ("messageDelta", "messageSoFar"),
    "reasoning.appended": ("reasoningDelta", "reasoningSoFar"),
}
_ENDS = {
    "turn.completed": "completed",
    "turn.failed": "failed",
    "turn.cancelled": "cancelled",
    "turn.sealed": "sealed",
}
_CANCELLED = "TURN_CANCELLED"

Status: TypeAlias = Literal["completed", "waiting", "failed", "cancelled", "sealed", "refused"]


@dataclass(frozen=True)
class Event:
    """A line of a stream. `raw` is all of it, also what this version does not know."""

    type: str
    data: Json
    #: None of what is in no log, and of a line that cannot be read.
    index: int | None
    meta: Json
    raw: Any = field(repr=False)

    @classmethod
    def read(cls, line: bytes) -> "Event":
        """The event of a line. One that cannot be read has no type, and its text as `raw`."""
        try:
            raw: Any = json.loads(line)
        except (ValueError, RecursionError):
            raw = line.decode(errors="replace")
        return cls.of(raw)

    @classmethod
    def of(cls, raw: Any) -> "Event":
        """The event of what a line has, whatever it is."""
        fields = _object(raw)
        type, meta = fields.get("type"), _object(fields.get("meta"))
        index = meta.get("index")
        known = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        return cls(
            type=type if isinstance(type, str) else "",
            data=_object(fields.get("data")),
            index=index if known else None,
            meta=meta,
            raw=raw,
        )

    @property
    def delivery_ids(self) -> Sequence[str]:
        """The deliveries that a turn reads with this event, or settles."""
        found: object = self.meta.get("deliveryIds")
        return [str(each) for each in cast("list[Any]", found)] if isinstance(found, list) else []

    @property
    def at(self) -> str:
        """When it was written: ISO 8601, in UTC."""
        return str(self.meta.get("at") or "")


@dataclass(frozen=True)
class Result:
    """What became of a turn."""

    #: `waiting`: it waits for the answers to `input_requests`. `refused`: no turn has read the delivery.
    status: Status
    #: The last text of the model that was not the beginning of calls.
    message: str | None
    #: The structured result, where there is an output schema.
    data: Any
    #: The open requests, as `input.requested` shows them, each with its `details`.
    input_requests: Sequence[Json]
    #: Of all steps of the turn: `input_tokens`, `output_tokens`, ….
    usage: Mapping[str, float]
    #: `code` and `message`, unless it has completed or waits.
    error: Mapping[str, Any] | None
    session_id: str
    turn_id: str | None
    #: The event that has ended it; None when nothing was to be waited for.
    boundary: str | None


class Draft:
    """What a turn has said so far: fed with its events, in order, it has the text without anything said twice.

    A worker that dies in the middle of a text is replaced, and the next one may say it again: the first text is
    retracted then (`step.superseded`), or continued (`step.recovered`).
    """

    def __init__(self) -> None:
        #: Of the step that speaks now, or has spoken last.
        self.text = ""
        self.reasoning = ""
        #: How often a text was retracted.
        self.retracted = 0
        self.message: str | None = None
        self.data: Any = None
        self.usage: dict[str, float] = {}
        self.turn_id: str | None = None
        #: The calls that have no result yet, by id.
        self.calls: dict[str, Json] = {}
        self.requests: dict[str, Json] = {}
        self.error: Json | None = None
        self._ended: str | None = None
        self._step: tuple[Any, Any] | None = None
        self._attempt: Any = None

    def add(self, event: Event) -> None:
        """Take the next event. Those of types that it does not know change nothing."""
        self._speak(event)
        self._act(event)

    def _speak(self, event: Event) -> None:
        """What changes the texts of a step."""
        match event.type:
            case "step.started":
                self._new_step(event)
            case "message.appended" | "reasoning.appended":
                self._append(event)
            case "message.completed" | "reasoning.completed":
                self._complete(event)
            case "step.superseded" if self._is_current(event):
                self.retracted += bool(self.text or self.reasoning)
                self.text = self.reasoning = ""
                self._attempt = event.meta.get("attempt")
            case "step.recovered" if self._is_current(event):
                self._attempt = event.meta.get("attempt")
            case _:
                pass

    def _act(self, event: Event) -> None:
        """What changes calls and requests, and what the turn has come to."""
        data = event.data
        if event.type == "turn.started" or self.turn_id is None:
            # A message that has entered a running turn is read from the middle of it.
            self.turn_id = data.get("turnId")
        match event.type:
            case "step.completed":
                for name, count in _object(data.get("usage")).items():
                    if isinstance(count, int | float):
                        self.usage[_snake(name)] = self.usage.get(_snake(name), 0) + count
            case "result.completed":
                self.data = data.get("result")
            case "actions.requested":
                self.calls |= {str(each.get("callId")): each for each in _objects(data.get("actions"))}
            case "action.result":
                self.calls.pop(str(_object(data.get("result")).get("callId")), None)
            case "input.requested":
                details = _object(data.get("details"))
                for each in _objects(data.get("requests")):
                    known = str(each.get("requestId"))
                    self.requests[known] = {**each, "details": _object(details.get(known))}
            case "input.resolved":
                self.requests.pop(str(data.get("requestId")), None)
            case "turn.completed" | "turn.failed" | "turn.cancelled" | "turn.sealed" | "session.failed":
                self._end(event)
            case _:
                pass

    def result(self, session_id: str, boundary: str | None) -> Result:
        """What became of the turn whose boundary this is."""
        status: Any = self._ended or "completed"
        if status == "completed" and self.requests:
            status = "waiting"
        return Result(
            status=status,
            message=self.message,
            data=self.data,
            input_requests=list(self.requests.values()),
            usage=dict(self.usage),
            error=self.error,
            session_id=session_id,
            turn_id=self.turn_id,
            boundary=boundary,
        )

    def _end(self, event: Event) -> None:
        code = event.data.get("code")
        if event.type != FAILED:
            self._ended = _ENDS[event.type]
        elif self._ended != "cancelled":
            self._ended = "cancelled" if code == _CANCELLED else "failed"
        if code is not None:
            self.error = {"code": code, "message": event.data.get("message")}

    def _new_step(self, event: Event) -> None:
        self._step, self._attempt = _step(event), None
        self.text = self.reasoning = ""

    def _append(self, event: Event) -> None:
        if not self._is_current(event):
            # We have come in its middle: the text so far has the beginning.
            self._new_step(event)
        piece, so_far = _DELTAS[event.type]
        attempt = event.meta.get("attempt")
        if attempt != self._attempt:
            # A new attempt says all of it again.
            self.retracted += bool(self._attempt is not None and (self.text or self.reasoning))
            self._attempt, self.text, self.reasoning = attempt, "", ""
        is_text = event.type == "message.appended"
        whole: object = event.data.get(so_far)
        before = self.text if is_text else self.reasoning
        now = whole if isinstance(whole, str) else before + str(event.data.get(piece) or "")
        if is_text:
            self.text = now
        else:
            self.reasoning = now

    def _complete(self, event: Event) -> None:
        if not self._is_current(event):
            self._new_step(event)
        if event.type == "reasoning.completed":
            self.reasoning = str(event.data.get("reasoning") or "")
            return
        message: object = event.data.get("message")
        self.text = message if isinstance(message, str) else ""
        if event.data.get("finishReason") != "tool-calls" and isinstance(message, str):
            self.message = message

    def _is_current(self, event: Event) -> bool:
        return self._step == _step(event)


def _step(event: Event) -> tuple[Any, Any]:
    return event.data.get("turnId"), event.data.get("stepIndex")


def _object(value: object) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[Json]:
    return (
        [cast("Json", each) for each in cast("list[Any]", value) if isinstance(each, dict)]
        if isinstance(value, list)
        else []
    )


def _snake(name: str) -> str:
    """`inputTokens` as Python writes it."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
