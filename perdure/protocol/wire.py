"""The base of every wire value."""

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

JsonObject: TypeAlias = dict[str, Any]


class Wire(BaseModel):
    """A frozen value that travels in camelCase; fields it does not know are ignored."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="ignore",
    )


class Versioned(Wire):
    """A wire value that is stored or outlives a deployment."""

    version: int = 1
