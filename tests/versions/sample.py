"""A value of a model in which every field is set, so that a fixture of it knows them all."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)

_PLAIN: dict[Any, Any] = {bool: True, int: 7, float: 7.5, str: "text", Any: "value"}


def sample_of(model: type[M], **fixed: Any) -> M:
    """A value of the model. `fixed` sets fields of this name, in this model and in those inside it."""
    values = {
        name: fixed[name] if name in fixed else _value(field.annotation, fixed)
        for name, field in model.model_fields.items()
        # By default the version is that of the model.
        if name != "version" or field.is_required()
    }
    return model.model_validate(values)


def _value(annotation: Any, fixed: Mapping[str, Any]) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        return _value(arguments[0], fixed)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        # The last one is the richest: a default, or a plain text, comes first.
        return _value(_options(annotation)[-1], fixed)
    if origin is dict or annotation is dict:
        return {"key": _value(arguments[1], fixed) if arguments else "value"}
    if origin in (tuple, list):
        items = [each for each in arguments if each is not ...]
        return [_value(option, fixed) for item in items for option in _options(item)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return sample_of(annotation, **fixed)
    raise TypeError(f"Say what a sample of {annotation!r} is.")


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for each in get_args(annotation) if each is not type(None)]
    return [annotation]


def paths_of(value: Any, path: str = "") -> set[str]:
    """Where in a JSON value there is what: `inbox[].id: text`."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {each for name, inner in fields.items() for each in paths_of(inner, f"{path}.{name}")} or {
            f"{path}: {{}}"
        }
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return {each for item in items for each in paths_of(item, f"{path}[]")} or {f"{path}: []"}
    kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    return {f"{path.removeprefix('.')}: {kind}"}


def contains(now: Any, was: Any) -> bool:
    """Whether everything of the older JSON value is in the newer one, which may have more fields."""
    if isinstance(was, dict) and isinstance(now, dict):
        known, fields = cast("dict[str, Any]", now), cast("dict[str, Any]", was)
        return all(name in known and contains(known[name], value) for name, value in fields.items())
    if isinstance(was, list) and isinstance(now, list):
        some, others = cast("list[Any]", now), cast("list[Any]", was)
        return len(some) == len(others) and all(map(contains, some, others))
    return now == was
