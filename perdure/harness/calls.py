"""What a reply asks for: the calls that can be made, and those that the model must be told it cannot make."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.names import outcome_slot
from perdure.protocol.requests import CallRef, Coordinates
from perdure.protocol.wire import JsonObject
from perdure.settings import Settings
from perdure.store.base import NewRecord

from .facts import Facts
from .journal import OUTCOME, AskedCall, Outcome, written
from .toolbox import InvalidArguments, Usable

#: Tries that the engine has for a call whose worker died, beside the tool's own retries.
_ATTEMPTS = 4
_SECRET = ("token", "password", "secret", "key", "credential", "authorization")
_SHORT = 40
_LONGEST = 160


class CallNames:
    """Call ids, unique in their session whatever the provider hands out: readers know a call by its id alone."""

    def __init__(self, at: Coordinates, taken: frozenset[str]) -> None:
        self._at = at
        self._taken = taken

    def of(self, call_id: str) -> str:
        return call_id if call_id and call_id not in self._taken else self._own(call_id or "call")

    def applied(self, response: ModelResponse) -> ModelResponse:
        """The response with each call under a name of its own."""
        names: set[str] = set()
        parts: list[Any] = []
        for part in response.parts:
            if isinstance(part, ToolCallPart):
                name = self.of(part.tool_call_id)
                if name in names:
                    name = f"{self._own(part.tool_call_id)}.{len(names)}"
                names.add(name)
                part = replace(part, tool_call_id=name)
            parts.append(part)
        return replace(response, parts=parts)

    def _own(self, call_id: str) -> str:
        return f"{call_id}~{self._at.turn}.{self._at.step}"


@dataclass(frozen=True)
class Asked:
    """The calls of one reply."""

    calls: tuple[AskedCall, ...]
    #: Outcomes of the calls that cannot be made; readers are not told of those calls at all.
    refused: tuple[NewRecord, ...]

    @property
    def possible(self) -> tuple[AskedCall, ...]:
        return tuple(call for call in self.calls if call.ref)

    def requested(self, facts: Facts) -> tuple[NewEvent, ...]:
        actions = [
            {"kind": "tool-call", "callId": call.call_id, "toolName": call.tool, "input": call.input}
            for call in self.possible
        ]
        return (facts.of_step(EventType.ACTIONS_REQUESTED, "actions", {"actions": actions}),) if actions else ()


def asked(response: ModelResponse, tools: Mapping[str, Usable], at: Coordinates, settings: Settings) -> Asked:
    """Sort the calls of a reply into those that can be made and those that cannot."""
    calls: list[AskedCall] = []
    refused: list[NewRecord] = []
    for part in response.tool_calls:
        arguments, problem = _checked(part, tools)
        call_id, tool = part.tool_call_id, part.tool_name
        ref = None if problem else _ref(part, tools[tool], arguments, settings)
        calls.append(AskedCall(call_id=call_id, tool=tool, input=arguments, ref=ref))
        if problem:
            outcome = Outcome(status="failed", output=problem, is_error=True)
            refused.append(written(at.turn, at.step, outcome_slot(call_id), OUTCOME, outcome))
    return Asked(tuple(calls), tuple(refused))


def _checked(part: ToolCallPart, tools: Mapping[str, Usable]) -> tuple[JsonObject, str | None]:
    """The arguments, and what is wrong with the call."""
    try:
        arguments = _arguments(part)
        if part.tool_name not in tools:
            known = ", ".join(tools) or "none"
            return arguments, f"Unknown tool {part.tool_name!r}. Tools that exist: {known}."
        tools[part.tool_name].check(arguments)
    except InvalidArguments as invalid:
        return {}, str(invalid)
    return arguments, None


def _arguments(part: ToolCallPart) -> JsonObject:
    try:
        arguments: object = json.loads(part.args or "{}") if isinstance(part.args, str | None) else part.args
    except ValueError as broken:
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not JSON ({broken}).") from None
    if not isinstance(arguments, dict):
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not a JSON object.")
    return {str(key): value for key, value in arguments.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _ref(part: ToolCallPart, tool: Usable, arguments: JsonObject, settings: Settings) -> CallRef:
    return CallRef(
        call_id=part.tool_call_id,
        tool=part.tool_name,
        summary=summary(part.tool_name, arguments) if settings.ui_detail == "on" else "",
        timeout=tool.timeout,
        heartbeat=settings.heartbeat_timeout,
        attempts=_ATTEMPTS + tool.retries,
    )


def summary(tool: str, arguments: Mapping[str, Any]) -> str:
    """The call in a line, without what looks like a secret."""
    shown = ", ".join(f"{name}={_shown(name, value)}" for name, value in arguments.items())
    return _cut(f"{tool}({shown})", _LONGEST)


def _shown(name: str, value: Any) -> str:
    if any(word in name.lower() for word in _SECRET):
        return "•••"
    # Nested values may hold secrets of their own; their size says enough.
    if isinstance(value, dict | list):
        return f"{{{len(value)}}}" if isinstance(value, dict) else f"[{len(value)}]"  # pyright: ignore[reportUnknownArgumentType]
    return _cut(json.dumps(value, ensure_ascii=False), _SHORT)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
