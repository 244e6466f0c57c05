"""Names and summaries of calls."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.protocol.requests import Coordinates
from perdure.text import shortened

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
                own, number = self._own(_usable(part.tool_call_id)), len(names)
                while name in names:
                    name, number = f"{own}_{number}", number + 1
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


def summary(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> str:
    """The call in a line, without what looks like a secret, or is one by the schema of the arguments."""
    declared = (schema or {}).get("properties", {})
    shown = ", ".join(f"{name}={_shown(name, value, declared.get(name))}" for name, value in arguments.items())
    return shortened(f"{tool}({shown})", _LONGEST)


def _is_secret(declared: Any) -> bool:
    """As pydantic says it of a `SecretStr`, alone or as one of several types."""
    if not isinstance(declared, Mapping):
        return False
    known = cast("Mapping[str, Any]", declared)
    return known.get("format") == "password" or any(_is_secret(each) for each in known.get("anyOf", ()))


def _shown(name: str, value: Any, declared: Any) -> str:
    if any(word in name.lower() for word in _SECRET) or _is_secret(declared):
        return "•••"
    # Nested values may hold secrets of their own; their size says enough.
    if isinstance(value, dict | list):
        return f"{{{len(value)}}}" if isinstance(value, dict) else f"[{len(value)}]"  # pyright: ignore[reportUnknownArgumentType]
    return shortened(json.dumps(value, ensure_ascii=False), _SHORT)
