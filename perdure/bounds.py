"""Text and values that Temporal, the databases, the providers and the readers accept."""

import re
from math import isfinite
from typing import Any, cast

from pydantic_core import to_json

#: The deepest values that are accepted. Serialisers between here and the model fail at about 250 levels.
DEEPEST = 100


def whole(text: str) -> str:
    """The text with unpaired surrogates replaced, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # UTF-16 joins the two halves of a pair into one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def repaired(value: Any) -> Any:
    """The JSON value with unpaired surrogates replaced, and numbers that are none, which most readers refuse."""
    try:
        # Nearly all values are as they should be, and this is fast.
        encoded = to_json(value)
        if b"NaN" not in encoded and b"Infinity" not in encoded:
            return value
    except ValueError:
        pass
    return _repaired(value)


def _repaired(value: Any) -> Any:
    match value:
        case str():
            return whole(value)
        case float():
            return value if isfinite(value) else None
        case dict():
            known = cast("dict[str, Any]", value)
            return {whole(name): _repaired(inner) for name, inner in known.items()}
        case list():
            return [_repaired(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def described(error: BaseException) -> str:
    """The error's type and text. `str` of a foreign error may raise."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return whole(f"{type(error).__name__}: {text}")


def shortened(text: str, longest: int) -> str:
    """The text, cut to `longest` characters with an ellipsis at the end."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def quoted(text: str, longest: int = 100) -> str:
    """Text of a caller or a provider for a quotation: short, with unprintable characters replaced."""
    # Cut first: the text may have megabytes.
    return "".join(character if character.isprintable() else "\ufffd" for character in shortened(text, longest))


_SECRET = re.compile(
    r"(?i)\b(?:sk|pk|rk|key|xai|gsk|ghp|aiza)[-_][\w*.-]{6,}|bearer\s+\S+|[?&](?:key|token|api_key)=\S+"
)
#: Longer runs without a space are more likely a credential or a blob than words.
_BLOB = re.compile(r"[A-Za-z0-9+/_=*.-]{40,}")
#: Characters of such a text.
_LONGEST_PUBLIC = 300


def public(text: str) -> str:
    """The text on one line, shortened, without anything that looks like a credential."""
    return shortened(_BLOB.sub("[…]", _SECRET.sub("[redacted]", " ".join(text.split()))), _LONGEST_PUBLIC)


#: Control characters, line ends, changes of direction, characters that nobody sees, and halves of characters.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u200b\\u2028-\\u202e\\u2060-\\u2064\\u2066-\\u2069\\ufeff\\ud800-\\udfff"
    "\\U000e0000-\\U000e007f]"
)


def printable(text: str) -> str:
    """Text of others for a line on a terminal, where a control character could be a command: escaped as in JSON."""
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    # JSON has pairs for what is beyond four digits.
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True))


def deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def more_than(value: Any, limit: int) -> bool:
    """Whether it contains more than `limit` values, all levels together."""
    count, level = 0, [value]
    while level:
        count += len(level)
        if count > limit:
            return True
        level = [child for parent in level for child in _children(parent)]
    return False


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


#: Timers and clocks differ by this many seconds.
_TOLERANCE = 0.005


def seconds_until(deadline: float, now: float) -> float:
    """The seconds that are left; a few milliseconds are none."""
    left = deadline - now
    return left if left > _TOLERANCE else 0.0
