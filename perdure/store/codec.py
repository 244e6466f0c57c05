"""JSON as the store keeps it, and the one place that knows which text a database cannot hold.

A body comes back exactly as it went in. NUL is escaped by JSON itself; an unpaired surrogate, which no UTF-8 can hold,
makes that one body travel as ASCII escapes. (Two surrogates that form a pair come back as the character they mean.)
"""

import json
from typing import Any

_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_ESCAPED = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)


def encode(value: Any) -> str:
    text = _COMPACT.encode(value)
    return text if _is_utf8(text) else _ESCAPED.encode(value)


def decode(text: str) -> Any:
    return json.loads(text)


def encode_some(value: Any) -> str | None:
    return None if value is None else encode(value)


def decode_some(text: str | None) -> Any:
    return None if text is None else decode(text)


def printable(text: str | None) -> str | None:
    """Text for people, with what no database can hold replaced."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
