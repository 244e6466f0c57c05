"""Output schemas: which ones are accepted, and the validation of results.

A caller supplies the schema and a model the result; together they can use a processor without end. So a schema is
checked against limits before it is accepted (`problem`), and a result is validated in a process that can be killed:
this file, run as a script. It imports nothing of Perdure, so that the process starts quickly.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, cast
from urllib.parse import unquote

Schema = Mapping[str, Any]

_MOST_BYTES = 65_536
#: Values of any kind, all levels together.
_MOST_VALUES = 5_000
_DEEPEST = 100
_MOST_PATTERNS = 50
_LONGEST_PATTERN = 1_000
#: The size of one compiled pattern, and of all patterns of a schema together, in bytes. Nested repetitions grow
#: quickly, and compiling blocks the event loop.
_LARGEST_PATTERN = 1_000_000
_ALL_PATTERNS = 10_000_000
#: A pattern counts as the smallest of these that it fits into.
_SIZES = (50_000, 200_000, 400_000, _LARGEST_PATTERN)
#: Schemas that apply to one value: alternatives, combinations, and the targets of their references.
_MOST_PER_VALUE = 2_000
_MOST_REFERENCES = 50
#: Values after each reference is replaced by its target. Some providers get this form, and making it blocks the event
#: loop.
_MOST_EXPANDED = 100_000
#: References that lead from one to the next.
_LONGEST_CHAIN = 200

_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_VALUE = ("not", "if", "then", "else")
_SAME_VALUE_BY_NAME = ("dependentSchemas", "dependencies")
_INSIDE = (
    "items",
    "prefixItems",
    "additionalItems",
    "contains",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_INSIDE_BY_NAME = ("properties", "patternProperties")
_DEFINED = ("$defs", "definitions")
#: These let a reference resolve to another schema than the one that it names.
_UNSUPPORTED = ("$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")

#: The limits of one validation: processor time in seconds, and memory in bytes.
_SECONDS = 2
_BYTES = 1 << 30


class _Unusable(Exception):
    """The schema cannot be used; the message has the reason."""


def problem(schema: Schema) -> str | None:
    """Why this cannot be the schema of a result; None when it can."""
    if _too_deep(schema):
        return f"it is nested deeper than {_DEEPEST} levels"
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        return "it is not JSON"
    return f"it is larger than {_MOST_BYTES} bytes" if size > _MOST_BYTES else _problem(text)


@lru_cache(maxsize=64)
def _problem(text: str) -> str | None:
    schema = json.loads(text)
    try:
        patterns = _Limits(schema).check()
        try:
            validator(schema, min(_LARGEST_PATTERN, _ALL_PATTERNS // max(1, len(patterns))))
        except ValueError:
            # A few patterns may be larger than their share when the others are small.
            _check_size(patterns)
            validator(schema)
    except _Unusable as unusable:
        return str(unusable)
    except ValueError as error:
        # The library's ValidationError is a ValueError, and has the path.
        message = _one_line(getattr(error, "message", None) or str(error))
        path: list[str | int] = getattr(error, "instance_path", [])
        return f"{message} (at {_one_line(_path(path))})" if path else message
    return None


def _check_size(patterns: set[str]) -> None:
    """Refuse patterns that are too large together. It stops as soon as the limit is exceeded."""
    left = _ALL_PATTERNS
    for pattern in patterns:
        # A pattern that fits no size is too large or not valid: the validator reports which, with the path.
        size = next((size for size in _SIZES if _fits(pattern, size)), 0)
        left -= size
        if left < 0:
            raise _Unusable("its patterns are too large together")


def _fits(pattern: str, size: int) -> bool:
    try:
        validator({"pattern": pattern}, size)
    except ValueError:
        return False
    return True


def validator(schema: Schema, largest_pattern: int = _LARGEST_PATTERN) -> Any:
    """Raises ValueError when the schema is not valid. Patterns take linear time, and nothing is ever fetched."""
    import jsonschema_rs  # imported late: most processes never use a schema

    patterns = jsonschema_rs.RegexOptions(size_limit=largest_pattern, dfa_size_limit=_LARGEST_PATTERN)
    return jsonschema_rs.validator_for(
        cast("dict[str, Any]", schema), pattern_options=patterns, offline=True, validate_formats=False
    )


class _Limits:
    """The limits of a schema that can be checked without a result."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._counted: dict[int, int] = {}
        self._following: set[int] = set()
        self._expanded: dict[int, int] = {}
        self._expanding: set[int] = set()
        self._recursive: set[int] = set()

    def check(self) -> set[str]:
        """Raise `_Unusable` when a limit is exceeded; return the patterns."""
        if sum(1 for _ in _values(self._root)) > _MOST_VALUES:
            raise _Unusable(f"it has more than {_MOST_VALUES} values")
        schemas = list(self._schemas())
        patterns = {schema["pattern"] for schema in schemas if isinstance(schema.get("pattern"), str)}
        for schema in schemas:
            patterns.update(_mapping(schema.get("patternProperties")))
        if len(patterns) > _MOST_PATTERNS:
            raise _Unusable(f"it has more than {_MOST_PATTERNS} patterns")
        if any(len(pattern) > _LONGEST_PATTERN for pattern in patterns):
            raise _Unusable(f"a pattern is longer than {_LONGEST_PATTERN} characters")
        for schema in schemas:
            if any(isinstance(schema.get(name), str | bool) for name in _UNSUPPORTED):
                raise _Unusable(f"{', '.join(_UNSUPPORTED)} are not supported")
            if "$id" in schema and schema is not self._root:
                raise _Unusable("only the whole schema may have an $id")
            if self._schemas_per_value(schema, 0) > _MOST_PER_VALUE:
                raise _Unusable(f"more than {_MOST_PER_VALUE} of its parts apply to one value")
        self._expanded_size(self._root, 0)
        return patterns

    def _schemas(self) -> Iterator[Schema]:
        """Every schema in it, each once."""
        left = [self._root]
        seen: set[int] = set()
        while left:
            schema = left.pop()
            if id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                left += _schemas((*self._same_value(schema), *_inside(schema), *_named(schema, _DEFINED)))

    def _same_value(self, schema: Schema) -> Iterator[Any]:
        """The schemas that apply to the same value as this one."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
        yield from _combined(schema)

    def _target(self, reference: object) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _Unusable(f"the reference {_one_line(str(reference))} leads out of it")
        found: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            named, listed = _mapping(found), _list(found)
            if name in named:
                found = named[name]
            elif name.isdecimal() and int(name[:9]) < len(listed):
                found = listed[int(name[:9])]
            else:
                raise _Unusable(f"what {_one_line(reference)} refers to does not exist")
        return found

    def _schemas_per_value(self, schema: Schema, references: int) -> int:
        known = self._counted.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._following:
            raise _Unusable("it refers to itself without end")
        if references > _MOST_REFERENCES:
            raise _Unusable(f"more than {_MOST_REFERENCES} of its parts lead from one to the next")
        self._following.add(id(schema))
        count = 1 + sum(self._schemas_per_value(part, references + 1) for part in _schemas(self._same_value(schema)))
        self._following.remove(id(schema))
        self._counted[id(schema)] = count
        return count

    def _expanded_size(self, schema: Schema, chain: int) -> int:
        """How many values it has with each reference replaced by its target; recursive references are not replaced."""
        known = self._expanded.get(id(schema))
        if known is not None:
            return known
        if chain > _LONGEST_CHAIN:
            raise _Unusable(f"more than {_LONGEST_CHAIN} of its references lead from one to the next")
        self._expanding.add(id(schema))
        count = sum(1 for _ in _values(schema))
        for target in self._references(schema):
            if id(target) in self._expanding:
                self._recursive.add(id(target))
            if id(target) not in self._recursive:
                count += self._expanded_size(target, chain + 1)
            if count > _MOST_EXPANDED:
                raise _Unusable(f"it has more than {_MOST_EXPANDED} values with its references written out")
        self._expanding.remove(id(schema))
        self._expanded[id(schema)] = count
        return count

    def _references(self, schema: Schema) -> Iterator[Schema]:
        """The targets of all references in it, without its definitions."""
        left = [schema]
        while left:
            part = left.pop()
            if "$ref" in part:
                yield from _schemas([self._target(part["$ref"])])
            left += _schemas((*_combined(part), *_inside(part)))


def _combined(schema: Schema) -> Iterator[Any]:
    """The schemas in it that apply to the same value."""
    for name in _SAME_VALUE_LISTS:
        yield from _list(schema.get(name))
    yield from (schema[name] for name in _SAME_VALUE if name in schema)
    yield from _named(schema, _SAME_VALUE_BY_NAME)


def _inside(schema: Schema) -> Iterator[Any]:
    """The schemas in it that apply to parts of the value."""
    for name in _INSIDE:
        inner = schema.get(name)
        yield from _list(inner) if isinstance(inner, list) else (inner,)
    yield from _named(schema, _INSIDE_BY_NAME)


def _named(schema: Schema, groups: Iterable[str]) -> Iterator[Any]:
    for group in groups:
        yield from _mapping(schema.get(group)).values()


def _schemas(values: Iterable[Any]) -> Iterator[Schema]:
    """The values that are objects; the schemas `true` and `false` have no parts."""
    return (cast(Schema, value) for value in values if isinstance(value, Mapping))


def _values(root: Any) -> Iterator[Any]:
    left = [root]
    while left:
        value = left.pop()
        yield value
        left += _children(value)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [child for parent in level for child in _children(parent)]
        if len(level) > _MOST_BYTES:
            # A schema with so many values exceeds the size limit anyway; an author's schema can contain itself.
            return False
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    return list(_mapping(value).values()) if isinstance(value, Mapping) else _list(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


# --- the process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Read `[schema, value]`; write whether the value fits, and on a second line the first errors."""
    schema, value = json.load(sys.stdin)
    _limit_resources()
    try:
        checked = validator(schema)
        fits = checked.is_valid(value)
    except (ValueError, RecursionError) as error:
        _write_line({"broken": _one_line(str(error))})
        return
    _write_line({"fits": fits})
    if not fits:
        # Finding all errors can take very long although the first answer was quick.
        errors = islice(checked.iter_errors(value), 5)
        _write_line([f"{_path(error.instance_path)}: {_one_line(error.message)}" for error in errors])


def _path(path: list[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _write_line(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _limit_resources() -> None:
    """The kernel ends this process at its limits, also when its worker has died."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # missing on some platforms

        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
        for what, limit in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, spent + _SECONDS),
            (resource.RLIMIT_AS, _BYTES),
        ):
            resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
