"""The base of every wire value."""

from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

JsonObject: TypeAlias = dict[str, Any]

#: The deepest values that are accepted. Serialisers between here and the model fail at about 250 levels.
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
        # Validation errors are logged, and the invalid input may be content.
        hide_input_in_errors=True,
    )


class Versioned(Wire):
    """A wire value that is stored, or that lives longer than a deployment."""

    version: int = 1


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
        return list(cast(JsonObject, value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []
