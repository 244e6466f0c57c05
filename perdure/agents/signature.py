"""The arguments of a tool: the schema from a function's signature, and the way from JSON to a call."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from perdure.bounds import shortened
from perdure.errors import InvalidDeclaration
from perdure.protocol.wire import JsonObject

from .context import ToolContext

_Parameter = inspect.Parameter

#: Only the first problems are reported: the full list can be a thousand times as long as the arguments.
_MOST_PROBLEMS = 15
_LONGEST_PROBLEM = 300
#: Above this number the problems are only counted: making the list is slower than the validation.
_LONGEST_LIST = 20_000


@dataclass(frozen=True)
class Arguments:
    """The validated arguments of a call, with the defaults of omitted ones."""

    #: Shown to readers, approved by people, and used for the run.
    json: JsonObject
    #: The same in the types that the tool declares, with models as dicts: for the author's functions.
    values: Callable[[], JsonObject]


@dataclass(frozen=True)
class Signature:
    """The parameters of a tool: the schema for the model, and the way from JSON to a call."""

    schema: JsonObject
    model: type[BaseModel]
    #: Key → parameter of the function, in the function's order. The context has a key, but no field in the model.
    fields: Mapping[str, str]
    positional: frozenset[str]
    context: str | None

    def read(self, arguments: JsonObject) -> Arguments:
        """The validated arguments; raises pydantic's `ValidationError` when they do not fit."""
        validated = self.model.model_validate_json(to_json(arguments))
        # Without warnings: a default need not fit its own annotation.
        return Arguments(
            self._round_trip_json(validated, arguments), lambda: validated.model_dump(by_alias=True, warnings=False)
        )

    def _round_trip_json(self, validated: BaseModel, sent: JsonObject) -> JsonObject:
        """The validated arguments as JSON that parses to the same values. An argument without such JSON stays."""
        keys = frozenset(self.model.model_fields)
        written: JsonObject = {}
        try:
            written = self._unchanged(validated, sent, keys)
        except Exception:
            # One argument that cannot be dumped or parsed, with any exception of its type, must not affect the others.
            for key in keys:
                with contextlib.suppress(Exception):
                    written = {**written, **self._unchanged(validated, sent, frozenset({key}))}
        shown = {**sent, **written}
        return {name: shown[name] for name in self.fields.values() if name in shown}

    def _unchanged(self, validated: BaseModel, sent: JsonObject, keys: frozenset[str]) -> JsonObject:
        """The JSON of those fields that parse to the same value, together with the sent arguments."""
        written = validated.model_dump(mode="json", by_alias=True, include=set(keys), warnings=False)
        again = self.model.model_validate_json(to_json({**sent, **written}))
        names = {key: self.fields[key] for key in keys if getattr(again, key) == getattr(validated, key)}
        return {name: written[name] for name in names.values()}

    def bind(self, arguments: BaseModel, context: ToolContext) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for the call, with the context in its place."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for key, parameter in self.fields.items():
            value = context if parameter == self.context else getattr(arguments, key)
            if parameter in self.positional:
                args.append(value)
            else:
                kwargs[parameter] = value
        return args, kwargs


def problems(invalid: ValidationError) -> str:
    """The problems of arguments, as a text for their sender."""
    count = invalid.error_count()
    if count > _LONGEST_LIST:
        return f"{count} problems"
    found = invalid.errors(include_url=False, include_context=False, include_input=False)
    lines = [
        shortened(f"{'.'.join(str(part) for part in error['loc']) or 'arguments'}: {error['msg']}", _LONGEST_PROBLEM)
        for error in found[:_MOST_PROBLEMS]
    ]
    return "; ".join(lines if count <= _MOST_PROBLEMS else [*lines, f"{count - _MOST_PROBLEMS} more problems"])


def read_signature(
    name: str, function: Callable[..., Any], descriptions: Mapping[str, str], local: Mapping[str, Any]
) -> Signature:
    hints = _hints(name, function, local)
    parameters = inspect.signature(function).parameters.values()
    fields: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    context: str | None = None
    for index, parameter in enumerate(parameters):
        hint = _hint(name, parameter, hints)
        key = f"p{index}"
        fields[key] = parameter.name
        if _is_context(hint):
            if context is not None:
                raise InvalidDeclaration(f"Tool {name!r} asks for the ToolContext twice.")
            context = parameter.name
        else:
            definitions[key] = (hint, _field(parameter, hint, descriptions.get(parameter.name)))
    model = _model(name, definitions)
    return Signature(
        schema=_schema(model),
        model=model,
        fields=fields,
        positional=frozenset(each.name for each in parameters if each.kind is _Parameter.POSITIONAL_ONLY),
        context=context,
    )


def _hints(name: str, function: Callable[..., Any], local: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, localns=dict(local), include_extras=True)
    except NameError as unknown:
        raise InvalidDeclaration(
            f"Tool {name!r}: the annotation {unknown.name!r} cannot be found; "
            "import it for real, not under TYPE_CHECKING."
        ) from None


def _hint(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    if parameter.kind in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD):
        raise InvalidDeclaration(
            f"Tool {name!r} takes *{parameter.name}: the schema for the model needs the name of each parameter."
        )
    if parameter.name not in hints:
        raise InvalidDeclaration(f"Tool {name!r}: the parameter {parameter.name!r} needs a type annotation.")
    return hints[parameter.name]


def _is_context(hint: Any) -> bool:
    return hint is ToolContext or any(_is_context(inner) for inner in get_args(hint))


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    # The name is an alias, because names such as `schema` or `model_id` have a meaning in a pydantic model.
    default = ... if parameter.default is _Parameter.empty else parameter.default
    described = next((meta for meta in get_args(hint) if isinstance(meta, FieldInfo)), None)
    text = described.description if described and described.description else description
    if isinstance(default, FieldInfo):
        raise InvalidDeclaration(f"{parameter.name!r}: put Field(…) into Annotated[…], not into the default.")
    return Field(default, alias=parameter.name, description=text)


def _model(name: str, definitions: dict[str, Any]) -> type[BaseModel]:
    try:
        return create_model(
            f"{name}_arguments",
            __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False),
            **definitions,
        )
    except (PydanticSchemaGenerationError, PydanticUserError) as unsupported:
        raise InvalidDeclaration(
            f"Tool {name!r} takes something that cannot be sent as JSON: {str(unsupported).splitlines()[0]}"
        ) from None


def _schema(model: type[BaseModel]) -> JsonObject:
    try:
        schema = model.model_json_schema(by_alias=True, mode="validation")
    except PydanticUserError as unsupported:
        raise InvalidDeclaration(f"{model.__name__}: {str(unsupported).splitlines()[0]}") from None
    schema.pop("title", None)
    for described in schema.get("properties", {}).values():
        described.pop("title", None)
    return schema
