"""From the events and the attempts of a turn to a tree: turn, steps, model calls, tool calls, and waits for people."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from perdure.protocol import names
from perdure.protocol.events import PIECES, Event, EventType, Usage
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptQuery, AttemptRow
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.engine.rows import stamp_of
from perdure.store.values import EventQuery

Kind: TypeAlias = Literal["turn", "step", "model", "call", "work", "wait"]

#: Events and attempts that are read at once, and the most of one turn.
_PAGE = 500
_MOST = 5_000
#: Deliveries of a turn that are looked up.
_DELIVERIES = 200

#: An attempt that has not failed.
_WELL = ("succeeded", "running")
_ENDS = {
    EventType.TURN_COMPLETED: "completed",
    EventType.TURN_FAILED: "failed",
    EventType.TURN_CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class Span:
    """Something that took time. Times are seconds since 1970."""

    kind: Kind
    name: str
    began: float
    # None: it goes on, or how it has ended is not stored.
    ended: float | None
    status: str
    # For how long it waited before it began.
    queued: float | None = None
    # When its attempts worked.
    tries: Sequence[tuple[float, float | None]] = ()
    # The codes of attempts that have failed, or of the turn.
    failures: Sequence[str] = ()
    usage: Usage = field(default_factory=Usage)
    # Of a wait: who may end it, and who has.
    waits_for: str | None = None
    answered_by: str | None = None
    # Of a call: the session that does it.
    session_id: str | None = None
    # Of a turn: what it has read.
    deliveries: int = 0
    spans: Sequence["Span"] = ()
    # False: there is more of it than is read.
    complete: bool = True

    @property
    def seconds(self) -> float | None:
        return None if self.ended is None else max(0.0, self.ended - self.began)

    @property
    def shown(self) -> JsonObject:
        """As JSON, without what is not known."""
        used = self.usage.model_dump(mode="json")
        known: JsonObject = {
            "kind": self.kind,
            "name": self.name,
            "status": self.status,
            "beganAt": stamp_of(self.began),
            "endedAt": None if self.ended is None else stamp_of(self.ended),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "queuedSeconds": None if self.queued is None else round(self.queued, 3),
            "attempts": len(self.tries) or None,
            "failures": list(self.failures) or None,
            "usage": used if any(used.values()) else None,
            "waitsFor": self.waits_for,
            "answeredBy": self.answered_by,
            "sessionId": self.session_id,
            "deliveries": self.deliveries or None,
            "complete": None if self.complete else False,
            "spans": [each.shown for each in self.spans] or None,
        }
        return {name: value for name, value in known.items() if value is not None}


async def turn_spans(store: Store, session_id: str, turn: int) -> Span | None:
    """What a turn has done; None if nothing of it is stored."""
    events, whole = await _events(store, session_id, turn)
    if not events:
        return None
    attempts, all_attempts = await _attempts(store, session_id, turn)
    read = [each for event in events for each in event.delivery_ids if event.type == EventType.TURN_STARTED]
    deliveries = await store.deliveries(session_id, list(dict.fromkeys(read))[:_DELIVERIES])
    return _Turn(turn, events, attempts, deliveries, complete=whole and all_attempts).span()


async def _events(store: Store, session_id: str, turn: int) -> tuple[Sequence[Event], bool]:
    found: list[Event] = []
    while len(found) < _MOST:
        after = found[-1].index if found else -1
        query = EventQuery(after=after, turn=turn, exclude=sorted(PIECES), limit=_PAGE)
        page = await store.find_events(session_id, query)
        found += page
        if len(page) < _PAGE:
            return found, True
    return found, False


async def _attempts(store: Store, session_id: str, turn: int) -> tuple[Sequence[AttemptRow], bool]:
    found: list[AttemptRow] = []
    cursor = None
    while len(found) < _MOST:
        page = await store.attempts.list(AttemptQuery(session_id, turn, _PAGE, cursor))
        found += page.attempts
        cursor = page.next_cursor
        if cursor is None:
            return found, True
    return found, False


class _Turn:
    def __init__(
        self,
        turn: int,
        events: Sequence[Event],
        attempts: Sequence[AttemptRow],
        deliveries: Sequence[DeliveryRow],
        *,
        complete: bool,
    ) -> None:
        self._turn = turn
        self._events = events
        self._deliveries = deliveries
        self._complete = complete
        self._results: dict[str, Event] = {}
        self._named: dict[str, str] = {}
        self._children: dict[str, Event] = {}
        self._resolved = [each for each in events if each.type == EventType.INPUT_RESOLVED]
        self._by_step: dict[int, list[Event]] = {}
        self._by_scope: dict[int, dict[str, list[AttemptRow]]] = {}
        for event in events:
            self._by_step.setdefault(event.step or 0, []).append(event)
            self._learn(event)
        for attempt in attempts:
            self._by_scope.setdefault(attempt.key.step, {}).setdefault(attempt.key.scope, []).append(attempt)

    def _learn(self, event: Event) -> None:
        """What later events say of a call: its name, its child and its end."""
        data = event.data or {}
        match event.type:
            case EventType.ACTIONS_REQUESTED:
                self._named |= {each["callId"]: _tool(each) for each in data.get("actions") or () if "callId" in each}
            case EventType.INPUT_REQUESTED:
                asked: list[JsonObject] = [each.get("action") or {} for each in _requests(event)]
                self._named |= {each["callId"]: _tool(each) for each in asked if "callId" in each}
            case EventType.SUBAGENT_CALLED:
                self._children[str(data.get("callId"))] = event
            case EventType.ACTION_RESULT:
                result: JsonObject = data.get("result") or {}
                call_id = str(result.get("callId"))
                self._results.setdefault(call_id, event)
                self._named.setdefault(call_id, _tool(result))
            case _:
                pass

    def span(self) -> Span:
        started = next((each for each in self._events if each.type == EventType.TURN_STARTED), self._events[0])
        ends = [each for each in self._events if each.type in _ENDS]
        began = _time(started.at)
        accepted = [_time(each.accepted_at) for each in self._deliveries]
        steps = [self._step(number, began) for number in self._steps()]
        status = _ENDS[ends[-1].type] if ends else "running"
        return Span(
            "turn",
            names.turn_id(self._turn),
            began,
            _time(ends[-1].at) if ends else None,
            status,
            queued=max(0.0, began - min(accepted)) if accepted else None,
            failures=[str(code) for each in ends if (code := (each.data or {}).get("code"))],
            usage=_sum(each.usage for each in steps),
            deliveries=len(self._deliveries),
            spans=[*steps, *self._waits()],
            complete=self._complete,
        )

    def _steps(self) -> Sequence[int]:
        seen = {each.step or 0 for each in self._events if each.type == EventType.STEP_STARTED}
        return sorted(seen | self._by_scope.keys())

    def _step(self, number: int, turn_began: float) -> Span:
        own = self._by_step.get(number, [])
        started = next((each for each in own if each.type == EventType.STEP_STARTED), None)
        ended = [each for each in own if each.type in (EventType.STEP_COMPLETED, EventType.STEP_FAILED)]
        spans = self._work(number, own)
        begins = [each.began for each in spans]
        began = _time(started.at) if started is not None else min(begins, default=turn_began)
        failed = bool(ended) and ended[-1].type == EventType.STEP_FAILED
        ends = [each.ended for each in spans if each.ended is not None] + [_time(each.at) for each in ended]
        runs = any(each.status == "running" for each in spans) or not ends
        return Span(
            "step",
            f"step {number}",
            began,
            None if runs else max(ends),
            "failed" if failed else "running" if runs else "completed",
            usage=_sum(each.usage for each in spans),
            spans=spans,
        )

    def _work(self, step: int, own: Sequence[Event]) -> Sequence[Span]:
        """The model call, then the other work of a step by the time when it began."""
        by_scope = self._by_scope.get(step, {})
        asked = next((each for each in own if each.type == EventType.ACTIONS_REQUESTED), None)
        actions: Sequence[JsonObject] = ((asked.data or {}).get("actions") if asked else None) or ()
        calls = [str(each.get("callId")) for each in actions]
        spans = [self._tried(scope, rows, asked) for scope, rows in by_scope.items()]
        without = [each for each in calls if names.call_scope(each) not in by_scope]
        spans += [span for each in without if asked and (span := self._untried(each, asked)) is not None]
        return sorted(spans, key=lambda each: (each.kind != "model", each.began))

    def _tried(self, scope: str, rows: Sequence[AttemptRow], asked: Event | None) -> Span:
        """Work that was attempted, by its attempts."""
        last = rows[-1]
        call_id = _call_of(scope)
        kind: Kind = "model" if scope == names.MODEL_SCOPE else "work" if call_id is None else "call"
        name = scope if call_id is None else self._named.get(call_id, scope)
        tries = [(_time(each.started_at), None if each.ended_at is None else _time(each.ended_at)) for each in rows]
        due = self._due(call_id, asked) if kind == "call" else None
        return Span(
            kind,
            name,
            tries[0][0],
            tries[-1][1],
            last.status,
            queued=None if due is None else max(0.0, tries[0][0] - due),
            tries=tries,
            failures=[str((each.error or {}).get("type", each.status)) for each in rows if each.status not in _WELL],
            usage=_sum(each.usage for each in rows),
        )

    def _due(self, call_id: str | None, asked: Event | None) -> float | None:
        """From when on a call could run: people may have had to approve it."""
        answered = [_time(each.at) for each in self._resolved if (each.data or {}).get("callId") == call_id]
        return max([*answered, *([] if asked is None else [_time(asked.at)])], default=None)

    def _untried(self, call_id: str, asked: Event) -> Span | None:
        """A call that no worker attempts: a child does it, or it was refused; None while it waits for people."""
        child, result = self._children.get(call_id), self._results.get(call_id)
        if child is None and result is None:
            return None
        data = (child.data or {}) if child is not None else {}
        status = "running" if result is None else str((result.data or {}).get("status", "completed"))
        return Span(
            "call",
            self._named.get(call_id, call_id),
            _time((child or asked).at),
            None if result is None else _time(result.at),
            status,
            session_id=data.get("childSessionId"),
        )

    def _waits(self) -> Sequence[Span]:
        """One for each input request of the turn."""
        resolved = {str((each.data or {}).get("requestId")): each for each in self._resolved}
        waits: list[Span] = []
        for event in self._events:
            if event.type != EventType.INPUT_REQUESTED:
                continue
            details: dict[str, JsonObject] = (event.data or {}).get("details") or {}
            for request in _requests(event):
                request_id = str(request.get("requestId"))
                waits.append(_wait(event, request, details.get(request_id) or {}, resolved.get(request_id)))
        return waits


def _requests(event: Event) -> Sequence[JsonObject]:
    return (event.data or {}).get("requests") or ()


def _wait(event: Event, request: JsonObject, details: JsonObject, resolved: Event | None) -> Span:
    kind = str(details.get("kind", "input"))
    tool = _tool(request.get("action") or {})
    data = (resolved.data or {}) if resolved is not None else {}
    answer: JsonObject = data.get("answer") or {}
    option = str(answer.get("optionId", "")) if kind == "approval" else ""
    return Span(
        "wait",
        f"{kind} of {tool}" if kind == "approval" and tool else kind,
        _time(event.at),
        None if resolved is None else _time(resolved.at),
        "open" if resolved is None else option or str(data.get("status", "resolved")),
        waits_for=_who(details.get("responders")),
        answered_by=answer.get("principalId"),
    )


def _who(responders: JsonObject | None) -> str | None:
    """Who may answer, in words."""
    if not responders:
        return None
    kind, values = str(responders.get("kind", "")), ", ".join(map(str, responders.get("values") or ()))
    quorum = responders.get("quorum") or 1
    return f"{kind} {values}".strip() + (f" ({quorum} of them)" if quorum != 1 else "")


def _tool(action: JsonObject) -> str:
    return str(action.get("toolName") or action.get("subagentName") or action.get("name") or "")


def _call_of(scope: str) -> str | None:
    """The id of the call that a scope is for."""
    prefix = names.call_scope("")
    return scope.removeprefix(prefix) if scope.startswith(prefix) else None


def _sum(usages: Iterable[Usage]) -> Usage:
    return sum(usages, Usage())


def _time(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()
