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
        # Validation errors are logged, and the invalid input may be content.
        hide_input_in_errors=True,
    )


class Versioned(Wire):
    """A wire value that is stored, or that lives longer than a deployment."""

    version: int = 1
