"""`final_output`: the model hands over a result that fits a schema, and the turn is done."""

import json
import re
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import jsonschema
import referencing
import referencing.exceptions
from jsonschema.validators import validator_for
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.tools import ToolDefinition

from perdure.agents.agent import FINAL_OUTPUT
from perdure.protocol.requests import Failure
from perdure.protocol.wire import JsonObject

from .journal import Result
from .toolbox import InvalidArguments

#: How often the model may get it wrong.
TRIES = 3

NOT_FULFILLED = Failure(
    code="OUTPUT_SCHEMA_NOT_FULFILLED",
    message="The agent could not produce a result matching the requested schema.",
)
TOO_EARLY = (
    "This result was not accepted: other calls of the same step wait for people. "
    "Call final_output again once you have their results."
)


class FinalOutput:
    """The tool that a schema makes. Providers take objects only, so anything else travels as `{value: …}`."""

    def __init__(self, schema: JsonObject) -> None:
        self._schema = schema
        self._wrapped = schema.get("type") != "object"

    @property
    def problem(self) -> Failure | None:
        """What is wrong with the schema itself."""
        try:
            cast(Any, validator_for(self._schema)).check_schema(self._schema)
        except jsonschema.SchemaError as error:
            return Failure(code="OUTPUT_SCHEMA_INVALID", message=f"The output schema is not valid: {error.message}")
        return None

    @property
    def definition(self) -> ToolDefinition:
        return ToolDefinition(
            name=FINAL_OUTPUT,
            description="Hand over the final result. Call this, and nothing else, once you have it.",
            parameters_json_schema=self._parameters,
        )

    def read(self, arguments: JsonObject) -> Result:
        """The result, checked; `InvalidArguments` says what does not fit."""
        if self._wrapped and "value" not in arguments:
            raise InvalidArguments(f"Invalid arguments for {FINAL_OUTPUT}: value: is missing")
        value = arguments["value"] if self._wrapped else arguments
        try:
            errors = list(self._validator.iter_errors(value))
        except (referencing.exceptions.Unresolvable, re.error) as broken:
            raise InvalidArguments(f"The output schema cannot be applied: {broken}") from None
        if errors:
            found = "; ".join(f"{error.json_path}: {error.message}" for error in errors[:5])
            raise InvalidArguments(f"Invalid arguments for {FINAL_OUTPUT}: {found}")
        return Result(value=value)

    @cached_property
    def _validator(self) -> Any:
        # With a registry of its own it never fetches a reference from the network.
        registry: Any = cast(Any, referencing.Registry)()
        return cast(Any, validator_for(self._schema))(self._schema, registry=registry)

    @property
    def _parameters(self) -> JsonObject:
        if not self._wrapped:
            return self._schema
        inner = {key: value for key, value in self._schema.items() if key not in ("$defs", "definitions", "$schema")}
        # References count from the root, so what they refer to stays there.
        shared = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return {"type": "object", "properties": {"value": inner}, "required": ["value"], **shared}


def without_final(response: ModelResponse) -> ModelResponse:
    """The reply without the calls by which a result was handed over."""
    parts = [part for part in response.parts if not (isinstance(part, ToolCallPart) and part.tool_name == FINAL_OUTPUT)]
    return replace(response, parts=parts)


def as_answer(response: ModelResponse, result: Result) -> ModelResponse:
    """The reply as history keeps it: the result is what the assistant said. Later turns do not know the tool."""
    said = TextPart(json.dumps(result.value, ensure_ascii=False))
    # OpenAI refuses a thought without the very item that followed it, and an item without its thought: no later
    # request of the session would be answered. What has no id belongs to no thought.
    kept = [
        replace(part, id=None) if isinstance(part, TextPart) else part
        for part in without_final(response).parts
        if not isinstance(part, ThinkingPart)
    ]
    return replace(response, parts=[*kept, said], finish_reason="stop")
