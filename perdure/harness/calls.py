"""Names and summaries of calls."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.protocol.requests import Coordinates

_SECRET = ("token", "password", "secret", "key", "credential", "authorization")
_SHORT = 40
_LONGEST = 160
#: Of an id, which is part of keys. Providers take back what they have sent, and nothing but these characters.
_LONGEST_ID = 200
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNNAMED = "tool_without_a_usable_name"


class CallNames:
    """Ids and tools of calls, whatever the provider hands out: readers know a call by its id alone, unique in its
    session, and providers refuse a whole session in which a tool has a name that none can have.
    """

    def __init__(self, at: Coordinates, taken: frozenset[str], tools: Collection[str]) -> None:
        self._at = at
        self._taken = taken
        self._tools = tools

    def of(self, call_id: str) -> str:
        usable = _usable(call_id)
        return usable if usable not in self._taken else self._own(usable)

    def tool(self, name: str) -> str:
        return name if name in self._tools or _NAME.fullmatch(name) else _UNNAMED

    def applied(self, response: ModelResponse) -> ModelResponse:
        """The response with each call under a name of its own."""
        names: set[str] = set()
        parts: list[Any] = []
        for part in response.parts:
            if isinstance(part, ToolCallPart):
                name = self.of(part.tool_call_id)
                if name in names:
                    name = f"{self._own(_usable(part.tool_call_id))}_{len(names)}"
                names.add(name)
                part = replace(part, tool_call_id=name, tool_name=self.tool(part.tool_name))
            parts.append(part)
        return replace(response, parts=parts)

    def _own(self, call_id: str) -> str:
        return f"{call_id}_{self._at.turn}_{self._at.step}"


def _usable(call_id: str) -> str:
    """The id itself, or one in its place: the same for each mention of it."""
    if call_id and call_id.isprintable() and len(call_id) <= _LONGEST_ID:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:24]


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
