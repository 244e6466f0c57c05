"""The base of every wire value."""

from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

JsonObject: TypeAlias = dict[str, Any]

#: Deeper values are no use to anybody, and serialisers between here and the model give up at about 250.
DEEPEST = 100


class Wire(BaseModel):
    """A frozen value that travels in camelCase; fields it does not know are ignored."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="ignore",
        # Their errors are logged, and what does not fit may be content.
        hide_input_in_errors=True,
    )


class Versioned(Wire):
    """A wire value that is stored or outlives a deployment."""

    version: int = 1


def deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def more_than(value: Any, limit: int) -> bool:
    """Whether it holds more than so many values, all levels together."""
    count, level = 0, [value]
    while level:
        count += len(level)
        if count > limit:
            return True
        level = [child for parent in level for child in _children(parent)]
    return False


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(JsonObject, value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []
