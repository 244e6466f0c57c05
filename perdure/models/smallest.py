"""The smallest value that fits a JSON schema: what the demo model hands over when a result is asked of it."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from perdure.agents.output_schema import problem, validator

Schema = Mapping[str, Any]

#: A schema that refers to itself is followed so far.
_DEEPEST = 12
#: Whoever sends a schema must not keep a worker busy with it.
_MOST = 5_000
#: Examples of formats; where the schema has a pattern too, or instead, they are tried as well.
_FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "demo@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_SHORT = ("", "a", "A", "0", "00", "000", "0000", "aa", "AA", "aaa", "AAA")


class Unfit(Exception):
    """Nothing was found that fits."""


def smallest(schema: Schema, words: str) -> Any:
    """A value that the schema should accept, with the words in it where a text may stand; `Unfit` when none is found.

    Whether it does accept it is not looked at here: whoever takes results compares them with their schema.
    """
    if found := problem(schema):
        raise Unfit(found)
    try:
        return _Maker(schema, words).value(schema)
    except (TypeError, AttributeError) as error:
        raise Unfit(str(error)) from error


class _Maker:
    """Makes values; the root of the schema is where references start."""

    def __init__(self, root: Schema, words: str) -> None:
        self._root = root
        self._words = words
        self._left = _MOST

    def value(self, schema: Any, depth: int = 0) -> Any:
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise Unfit("the schema has no end")
        if not isinstance(schema, Mapping):
            return self._anything(schema)
        schema = self._whole(cast(Schema, schema), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._chosen(schema["enum"])
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._one_of(schema, name, depth)
        return self._typed(_type(schema), schema, depth)

    def _anything(self, schema: Any) -> Any:
        if schema is False:
            raise Unfit("nothing is allowed here")
        return self._words

    def _whole(self, schema: Schema, depth: int) -> Schema:
        """The schema with what it refers to, and all that it has to be at once."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise Unfit("the schema has no end")
        rest = {key: part for key, part in schema.items() if key not in ("$ref", "allOf")}
        parts = [*([self._referred(schema["$ref"])] if "$ref" in schema else ()), *schema.get("allOf", ())]
        for part in parts:
            rest = _merged(self._whole(part, depth + 1), rest)
        return rest

    def _referred(self, reference: str) -> Schema:
        found: Any = self._root
        for step in filter(None, reference.removeprefix("#").split("/")):
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        if not reference.startswith("#") or not isinstance(found, Mapping):
            raise Unfit(f"{reference} leads nowhere")
        return cast(Schema, found)

    def _chosen(self, values: Sequence[Any]) -> Any:
        """The value that the words name, or else the first one."""
        said = self._words.lower()
        named = [value for value in values if isinstance(value, str) and value and value.lower() in said]
        return [*named, *values][0]

    def _one_of(self, schema: Schema, name: str, depth: int) -> Any:
        rest = {key: part for key, part in schema.items() if key != name}
        problem = Unfit(f"no alternative of {name} can be met")
        for alternative in schema[name]:
            try:
                return self.value(_merged(rest, alternative), depth + 1)
            except Unfit as unfit:
                problem = unfit
        raise problem

    def _typed(self, type: str, schema: Schema, depth: int) -> Any:
        match type:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer" | "number":
                return self._number(schema, whole=type == "integer")
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return self._string(schema)

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties = cast("dict[str, Any]", schema.get("properties", {}))
        wanted = [*schema.get("required", ())]
        if not wanted:
            # Nothing has to be said, but something can be.
            texts = (name for name, inner in properties.items() if _is_text(inner))
            wanted = [*texts][:1]
        rest = schema.get("additionalProperties", True)
        spare = (name for name in properties if name not in wanted)
        wanted += [name for name, _ in zip(spare, range(schema.get("minProperties", 0) - len(wanted)), strict=False)]
        return {name: self.value(properties.get(name, rest), depth + 1) for name in wanted}

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        first = list(schema.get("prefixItems", ()))
        count = max(schema.get("minItems", 0), 1 if "contains" in schema else 0)
        if count > _MOST:
            raise Unfit("the list is too long")
        inner = schema.get("contains", schema.get("items", True))
        items = [self.value(each, depth + 1) for each in [*first, *[inner] * count][:count]]
        if not schema.get("uniqueItems"):
            return items
        return self._apart(items, inner)

    def _apart(self, items: list[Any], inner: Any) -> list[Any]:
        """The items made different from each other, where their kind is one that can be counted."""
        if isinstance(inner, Mapping) and "enum" in inner:
            return list(cast(Any, inner)["enum"][: len(items)])
        told: list[Any] = []
        for number, item in enumerate(items):
            told.append(item + number if _countable(item) else f"{item} {number + 1}" if number else item)
        return told

    def _number(self, schema: Schema, *, whole: bool) -> int | float:
        said = re.search(r"-?\d{1,15}", self._words)
        for number in [*([int(said[0])] if said else ()), *_bounds(schema, whole=whole)]:
            if _fits(number, schema):
                return number
        raise Unfit("no number was found")

    def _string(self, schema: Schema) -> str:
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        if shortest > _MOST:
            raise Unfit("the text is too long")
        told = self._words if len(self._words) <= longest else self._words[: int(longest)]
        example = _FORMATS.get(schema.get("format", ""))
        matches = validator({"pattern": schema.get("pattern", "")}).is_valid
        texts = [example] if example else [told, told.ljust(shortest, "."), *_SHORT, *_FORMATS.values()]
        for text in texts:
            if shortest <= len(text) <= longest and matches(text):
                return text
        raise Unfit("no text was found")


def _type(schema: Schema) -> str:
    known = schema.get("type")
    if isinstance(known, list):
        types = [each for each in cast("list[str]", known) if each != "null"]
        return types[0] if types else "null"
    if known:
        return known
    for type, keys in (
        ("object", ("properties", "required", "additionalProperties")),
        ("array", ("items", "prefixItems", "minItems", "contains")),
        ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ):
        if any(key in schema for key in keys):
            return type
    return "string"


def _is_text(schema: Any) -> bool:
    """Whether any text will do."""
    if not isinstance(schema, Mapping):
        return False
    known = cast(Schema, schema)
    return known.get("type") == "string" and not {"enum", "const", "format", "pattern"} & set(known)


def _countable(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _bounds(schema: Schema, *, whole: bool) -> Iterator[int | float]:
    """Numbers near which the smallest one that fits is to be found."""
    step = schema.get("multipleOf", 1)
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    yield 0
    for bound, direction in ((low, 1), (high, -1)):
        if math.isfinite(bound):
            near = math.floor(bound / step) if direction < 0 else math.ceil(bound / step)
            yield from (number for number in (near * step, (near + direction) * step) if not whole or number % 1 == 0)
    if not whole and math.isfinite(low) and math.isfinite(high):
        yield (low + high) / 2


def _fits(number: int | float, schema: Schema) -> bool:
    return (
        schema.get("minimum", -math.inf) <= number <= schema.get("maximum", math.inf)
        and schema.get("exclusiveMinimum", -math.inf) < number < schema.get("exclusiveMaximum", math.inf)
        and ("multipleOf" not in schema or abs(number / schema["multipleOf"] % 1) < 1e-9)
    )


def _merged(one: Schema, other: Schema) -> dict[str, Any]:
    """Both at once; where they speak of the same, the second has the last word."""
    merged = {**one, **other}
    if "properties" in one and "properties" in other:
        merged["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        merged["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return merged
