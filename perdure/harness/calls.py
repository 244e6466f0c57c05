"""Names and summaries of calls."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.protocol.requests import Coordinates

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
