"""What a deployment does not show to readers of events: types that are left out, and types without their content.

It applies when events are read, in every form, so it holds for old events, too, and the log keeps everything. Indexes
do not change: two processes with different policies show the same events at the same indexes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.errors import Invalid

from .events import DELTAS, PIECES, Event, EventType
from .wire import JsonObject

#: The type of what stands for an event that is left out, where readers count events. It is never stored.
EVENT_EXCLUDED = "event.excluded"

#: What stands for content that is not shown. Of pieces nothing is shown, so that they add up to nothing.
REDACTED = "[redacted]"

#: What can be left out: pieces of what comes whole later, and reasoning. Everything else is authoritative, or clients
#: wait for it.
EXCLUDABLE = (*PIECES, EventType.REASONING_COMPLETED)


def _action(action: JsonObject) -> JsonObject:
    # Clients expect an object.
    return {**action, "input": {"redacted": True}} if "input" in action else action


def _requested(data: JsonObject) -> JsonObject:
    return {**data, "actions": [_action(each) for each in data.get("actions") or ()]}


def _result(data: JsonObject) -> JsonObject:
    result: JsonObject = data.get("result") or {}
    error: JsonObject | None = data.get("error")
    shown: JsonObject = {**data, "result": {**result, "output": REDACTED}}
    return shown if error is None else {**shown, "error": {"code": error.get("code"), "message": REDACTED}}


def _plan(plan: JsonObject) -> JsonObject:
    """The plan without its texts: how many steps there are, and how far they are."""
    # By name: what only a newer build says of a plan may be text, too.
    steps = [{**_only(each, "stepId", "status", "doneAt"), "title": REDACTED} for each in plan.get("steps") or ()]
    return {**_only(plan, "status"), "objective": REDACTED, "steps": steps}


def _only(fields: JsonObject, *names: str) -> JsonObject:
    return {name: fields[name] for name in names if name in fields}


def _planned(data: JsonObject) -> JsonObject:
    return {**data, "plan": _plan(data.get("plan") or {})}


def _with(field: str, value: Any) -> Callable[[JsonObject], JsonObject]:
    return lambda data: {**data, field: value}


#: What can be shown without its content, and how.
_REDACTIONS: Mapping[str, Callable[[JsonObject], JsonObject]] = {
    **{type: _with(delta, "") for type, (delta, _) in DELTAS.items()},
    EventType.ACTION_INPUT_APPENDED: _with("inputTextDelta", ""),
    EventType.REASONING_COMPLETED: _with("reasoning", REDACTED),
    EventType.ACTIONS_REQUESTED: _requested,
    EventType.ACTION_RESULT: _result,
    EventType.SUBAGENT_COMPLETED: _with("output", REDACTED),
    EventType.PLAN_UPDATED: _planned,
}
REDACTABLE = tuple(_REDACTIONS)

#: The types that have the same content: to hide one and show the other hides nothing.
_ALSO = (
    (EventType.REASONING_COMPLETED, EventType.REASONING_APPENDED),
    (EventType.ACTIONS_REQUESTED, EventType.ACTION_INPUT_APPENDED),
    (EventType.ACTION_RESULT, EventType.SUBAGENT_COMPLETED),
    (EventType.SUBAGENT_COMPLETED, EventType.ACTION_RESULT),
    # The model writes its plan with calls, and gets it as their results.
    (EventType.PLAN_UPDATED, EventType.ACTIONS_REQUESTED),
    (EventType.PLAN_UPDATED, EventType.ACTION_RESULT),
)


@dataclass(frozen=True)
class StreamPolicy:
    """The types that are left out, and those that are shown without their content. The first wins."""

    exclude: frozenset[str] = frozenset()
    redact: frozenset[str] = frozenset()

    @property
    def tag(self) -> str:
        """What distinguishes pages of this policy from those of others, in caches. None hides nothing: it is empty."""
        return "-".join([*sorted(self.exclude), "", *sorted(self.redact)]) if self.exclude or self.redact else ""

    def type(self, type: str) -> str:
        return EVENT_EXCLUDED if type in self.exclude else type

    def shown(self, event: Event) -> Event:
        """The event as readers see it, at its index."""
        if event.type in self.exclude:
            return event.model_copy(update={"type": EVENT_EXCLUDED, "data": None})
        if event.type in self.redact and event.data is not None:
            return event.model_copy(update={"data": _REDACTIONS[event.type](event.data)})
        return event

    def said(self, message: JsonObject) -> JsonObject:
        """A message of a transcript without what readers of events do not see, either."""
        if "parts" in message:
            shown = [each for part in message["parts"] if (each := self._part(part)) is not None]
            return {**message, "parts": shown}
        hides = message.get("role") == "tool" and EventType.ACTION_RESULT in self.redact
        return {**message, "output": REDACTED} if hides else message

    def plan(self, plan: JsonObject | None) -> JsonObject | None:
        """The plan of a session without what readers of events do not see, either."""
        return plan if plan is None or EventType.PLAN_UPDATED not in self.redact else _plan(plan)

    def snapshot(self, snapshot: JsonObject) -> JsonObject:
        """The same for the state of a session, which tools have made of their arguments and results."""
        if EventType.PLAN_UPDATED not in self.redact:
            return snapshot
        slices = [{**each, "items": [REDACTED] * len(each["items"])} for each in snapshot["slices"]]
        slots = dict.fromkeys(snapshot["slots"], REDACTED)
        return {**snapshot, "slices": slices, "slots": slots, "plan": self.plan(snapshot["plan"])}

    def _part(self, part: JsonObject) -> JsonObject | None:
        match part.get("type"):
            case "reasoning" if EventType.REASONING_COMPLETED in self.exclude:
                return None
            case "reasoning" if EventType.REASONING_COMPLETED in self.redact:
                return {**part, "text": REDACTED}
            case "tool-call" if EventType.ACTIONS_REQUESTED in self.redact:
                return _action(part)
            case _:
                return part


SHOWS_ALL = StreamPolicy()


def stream_policy(exclude: Sequence[str], redact: Sequence[str]) -> StreamPolicy:
    """The policy with these types, as `PERDURE_STREAM_EXCLUDE` and `PERDURE_STREAM_REDACT` name them."""
    for name, given, allowed in (("EXCLUDE", exclude, EXCLUDABLE), ("REDACT", redact, REDACTABLE)):
        for each in given:
            if each not in allowed:
                some = ", ".join(sorted(allowed))
                raise Invalid(f"PERDURE_STREAM_{name}: {each!r} has to be shown as it is. These need not: {some}.")
    for type, also in _ALSO:
        if type in (*exclude, *redact) and also not in (*exclude, *redact):
            raise Invalid(f"PERDURE_STREAM_…: {also!r} shows the content of {type!r}: name it, too.")
    if EventType.REASONING_COMPLETED in exclude and EventType.REASONING_APPENDED not in exclude:
        # The pieces would begin what never ends.
        raise Invalid("PERDURE_STREAM_EXCLUDE: 'reasoning.completed' is left out only with 'reasoning.appended'.")
    hides_calls = {EventType.ACTIONS_REQUESTED, EventType.ACTION_RESULT} & {*redact}
    # Named or not: those who hide what tools get and return may have begun to before there were plans.
    return StreamPolicy(frozenset(exclude), frozenset({*redact, *([EventType.PLAN_UPDATED] if hides_calls else ())}))
