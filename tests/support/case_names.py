"""Cases of a parametrised test are named by their values where pytest would only count: `limit=0`, not `params3`."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import BaseModel

_LONGEST = 80


def pytest_make_parametrize_id(val: Any) -> str | None:
    structured = isinstance(val, dict | list | tuple | set | frozenset | BaseException | BaseModel)
    if not structured and (isinstance(val, type) or not dataclasses.is_dataclass(val)):
        return None
    name = getattr(cast("Any", val), "name", None)
    text = (name if isinstance(name, str) else _described(val)).strip() or "empty"
    return text.encode("unicode_escape").decode("ascii")[:_LONGEST]


def _described(value: Any) -> str:
    """The value in short, and the same in every process: workers of pytest-xdist match cases by their names."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        return " ".join(f"{key}={_described(each)}" for key, each in fields.items())
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_described(each) for each in cast("Iterable[Any]", value)]
        return ",".join(sorted(parts) if isinstance(value, set | frozenset) else parts)
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return f"{type(value).__name__}({_described(_set_fields(value))})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return value if isinstance(value, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _set_fields(value: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    if isinstance(value, BaseModel):
        defaults = {name: field.default for name, field in type(value).model_fields.items()}
    else:
        defaults = {field.name: field.default for field in dataclasses.fields(value) if field.repr}
    given = {name: getattr(value, name) for name in defaults}
    return {name: each for name, each in given.items() if each != defaults[name] and each not in ((), [], {})}
