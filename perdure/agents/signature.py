"""From a function's signature to the arguments that a model may send."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from perdure.errors import InvalidDeclaration
from perdure.protocol.wire import JsonObject
from perdure.text import shortened

from .context import ToolContext

_Parameter = inspect.Parameter

#: Of what is wrong with arguments, the first is told: all of it can be a thousand times as long as they are.
_MOST_PROBLEMS = 15
_LONGEST_PROBLEM = 300
#: The list is made as a whole, and takes longer than the validation.
_LONGEST_LIST = 20_000


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call as it will run: they fit the tool, and what was left out has its default."""

    #: What readers see, what is approved, and what the call is run with.
    json: JsonObject
    #: Makes the same of the types that the tool declares, with models as dicts: for the author's functions.
    values: Callable[[], JsonObject]


@dataclass(frozen=True)
class Signature:
    """What a tool takes: the schema that the model sees, and the way from JSON to a call."""

    schema: JsonObject
    model: type[BaseModel]
    #: Field of the model → parameter of the function, in the function's order; None stands for the context.
    fields: Mapping[str, str]
    positional: frozenset[str]
    context: str | None

    def read(self, arguments: JsonObject) -> Arguments:
        """What a call with these arguments runs with; pydantic's `ValidationError` when it cannot run."""
        validated = self.model.model_validate_json(to_json(arguments))
        # A default need not fit its own annotation.
        return Arguments(
            self._written(validated, arguments), lambda: validated.model_dump(by_alias=True, warnings=False)
        )

    def _written(self, validated: BaseModel, sent: JsonObject) -> JsonObject:
        """The validated arguments as JSON that reads back as the same; what has no such form stays as it was sent."""
        keys = frozenset(self.model.model_fields)
        written: JsonObject = {}
        try:
            written = self._faithful(validated, sent, keys)
        except Exception:
            # One that cannot be written or read back, whatever its type raises, must not hide the others.
            for key in keys:
                with contextlib.suppress(Exception):
                    written = {**written, **self._faithful(validated, sent, frozenset({key}))}
        shown = {**sent, **written}
        return {name: shown[name] for name in self.fields.values() if name in shown}

    def _faithful(self, validated: BaseModel, sent: JsonObject, keys: frozenset[str]) -> JsonObject:
        """Of these fields, the JSON of those that read back as the same beside what was sent."""
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
    """What is wrong with arguments, in words for whoever sent them."""
    count = invalid.error_count()
    if count > _LONGEST_LIST:
        return f"{count} problems"
    found = invalid.errors(include_url=False, include_context=False, include_input=False)
    told = [
        shortened(f"{'.'.join(str(part) for part in error['loc']) or 'arguments'}: {error['msg']}", _LONGEST_PROBLEM)
        for error in found[:_MOST_PROBLEMS]
    ]
    return "; ".join(told if count <= _MOST_PROBLEMS else [*told, f"{count - _MOST_PROBLEMS} more problems"])


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
            f"Tool {name!r} takes *{parameter.name}: a model cannot be told what to send; name each parameter."
        )
    if parameter.name not in hints:
        raise InvalidDeclaration(f"Tool {name!r}: the parameter {parameter.name!r} needs a type annotation.")
    return hints[parameter.name]


def _is_context(hint: Any) -> bool:
    return hint is ToolContext or any(_is_context(inner) for inner in get_args(hint))


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    # An alias carries the name, because names such as `schema` or `model_id` mean something to a pydantic model.
    default = ... if parameter.default is _Parameter.empty else parameter.default
    described = next((meta for meta in get_args(hint) if isinstance(meta, FieldInfo)), None)
    told = described.description if described and described.description else description
    if isinstance(default, FieldInfo):
        raise InvalidDeclaration(f"{parameter.name!r}: put Field(…) into Annotated[…], not into the default.")
    return Field(default, alias=parameter.name, description=told)


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
