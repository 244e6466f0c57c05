"""Schemas of results: what one may be, and whether a result fits it.

A schema comes from a caller, a result from a model, and together they can keep a processor busy for ever. So a schema
is bounded before it is accepted (`problem`), and a result is compared with it in a process that can be killed: this
file, run as a script. It imports nothing of Perdure, so that the process starts quickly.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

Schema = Mapping[str, Any]

_MOST_BYTES = 65_536
#: Values of any kind, all levels together.
_MOST_VALUES = 5_000
_DEEPEST = 100
_MOST_PATTERNS = 50
_LONGEST_PATTERN = 1_000
#: What a pattern may take as a program, in bytes, and all of a schema together: a repetition of a repetition grows
#: quickly, and while patterns are compiled nobody else is served.
_LARGEST_PATTERN = 1_000_000
_ALL_PATTERNS = 10_000_000
#: A pattern counts as the smallest of these that it fits into.
_SIZES = (50_000, 200_000, 400_000, _LARGEST_PATTERN)
#: Schemas that speak of one and the same value: alternatives, combinations, and what they refer to.
_MOST_AT_ONCE = 2_000
_MOST_REFERENCES = 50
#: Values where each reference is replaced with what it refers to: some providers are sent it like this, and until then
#: nobody else is served.
_MOST_WRITTEN_OUT = 100_000
#: Definitions on the way from one to the next.
_LONGEST_WAY = 200

_HERE = ("allOf", "anyOf", "oneOf")
_HERE_TOO = ("not", "if", "then", "else")
_HERE_BY_NAME = ("dependentSchemas", "dependencies")
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
#: They let a reference mean another schema than the one that it names.
_MOVED = ("$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")

#: Processor time, in seconds, and memory, in bytes, that one comparison may take.
_SECONDS = 2
_BYTES = 1 << 30


class _Unfit(Exception):
    """The schema cannot be used; the text says why."""


def problem(schema: Schema) -> str | None:
    """Why this cannot be the schema of a result; None when it can."""
    if _deeper(schema):
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
        patterns = _Bounds(schema).check()
        try:
            validator(schema, min(_LARGEST_PATTERN, _ALL_PATTERNS // max(1, len(patterns))))
        except ValueError:
            # Few may be larger than their share, beside others that are small.
            _check_size(patterns)
            validator(schema)
    except _Unfit as unfit:
        return str(unfit)
    except ValueError as error:
        # A ValidationError of the library is one, and says where.
        message = _shown(getattr(error, "message", None) or str(error))
        path: list[str | int] = getattr(error, "instance_path", [])
        return f"{message} (at {_shown(_place(path))})" if path else message
    return None


def _check_size(patterns: set[str]) -> None:
    """Refuse patterns that are too large together. It stops at the first too many."""
    left = _ALL_PATTERNS
    for pattern in patterns:
        # One that fits nowhere is too large alone, or is none: the validator says which, and where.
        size = next((size for size in _SIZES if _fits(pattern, size)), 0)
        left -= size
        if left < 0:
            raise _Unfit("its patterns are too large together")


def _fits(pattern: str, size: int) -> bool:
    try:
        validator({"pattern": pattern}, size)
    except ValueError:
        return False
    return True


def validator(schema: Schema, largest_pattern: int = _LARGEST_PATTERN) -> Any:
    """Raises ValueError when the schema is not valid. Patterns take linear time, and nothing is ever fetched."""
    import jsonschema_rs  # as late as this: most processes never see a schema

    patterns = jsonschema_rs.RegexOptions(size_limit=largest_pattern, dfa_size_limit=_LARGEST_PATTERN)
    return jsonschema_rs.validator_for(
        cast("dict[str, Any]", schema), pattern_options=patterns, offline=True, validate_formats=False
    )


class _Bounds:
    """What can be seen of a schema without a result."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._counted: dict[int, int] = {}
        self._following: set[int] = set()
        self._written: dict[int, int] = {}
        self._writing: set[int] = set()
        self._recursive: set[int] = set()

    def check(self) -> set[str]:
        """The patterns that it has."""
        if sum(1 for _ in _values(self._root)) > _MOST_VALUES:
            raise _Unfit(f"it has more than {_MOST_VALUES} values")
        schemas = list(self._schemas())
        patterns = self._patterns(schemas)
        for schema in schemas:
            if any(isinstance(schema.get(name), str | bool) for name in _MOVED):
                raise _Unfit(f"{', '.join(_MOVED)} are not supported")
            if "$id" in schema and schema is not self._root:
                raise _Unfit("only the whole schema may have an $id")
            if self._at_once(schema, 0) > _MOST_AT_ONCE:
                raise _Unfit(f"more than {_MOST_AT_ONCE} of its parts apply to one value")
        self._written_out(self._root, 0)
        return patterns

    def _patterns(self, schemas: list[Schema]) -> set[str]:
        patterns = {schema["pattern"] for schema in schemas if isinstance(schema.get("pattern"), str)}
        for schema in schemas:
            patterns.update(_mapping(schema.get("patternProperties")))
        if len(patterns) > _MOST_PATTERNS:
            raise _Unfit(f"it has more than {_MOST_PATTERNS} patterns")
        if any(len(pattern) > _LONGEST_PATTERN for pattern in patterns):
            raise _Unfit(f"a pattern is longer than {_LONGEST_PATTERN} characters")
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
                left += _schemas((*self._here(schema), *_inside(schema), *_named(schema, _DEFINED)))

    def _here(self, schema: Schema) -> Iterator[Any]:
        """The schemas that apply to the same value as this one."""
        if "$ref" in schema:
            yield self._referred(schema["$ref"])
        yield from _combined(schema)

    def _referred(self, reference: object) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _Unfit(f"the reference {_shown(str(reference))} leads out of it")
        found: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            named, listed = _mapping(found), _list(found)
            if name in named:
                found = named[name]
            elif name.isdecimal() and int(name[:9]) < len(listed):
                found = listed[int(name[:9])]
            else:
                raise _Unfit(f"what {_shown(reference)} refers to does not exist")
        return found

    def _at_once(self, schema: Schema, references: int) -> int:
        known = self._counted.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._following:
            raise _Unfit("it refers to itself without end")
        if references > _MOST_REFERENCES:
            raise _Unfit(f"more than {_MOST_REFERENCES} of its parts lead from one to the next")
        self._following.add(id(schema))
        count = 1 + sum(self._at_once(part, references + 1) for part in _schemas(self._here(schema)))
        self._following.remove(id(schema))
        self._counted[id(schema)] = count
        return count

    def _written_out(self, schema: Schema, way: int) -> int:
        """How many values it has with its references written out; one that leads back to itself stays a reference."""
        known = self._written.get(id(schema))
        if known is not None:
            return known
        if way > _LONGEST_WAY:
            raise _Unfit(f"more than {_LONGEST_WAY} of its references lead from one to the next")
        self._writing.add(id(schema))
        count = sum(1 for _ in _values(schema))
        for referred in self._references(schema):
            if id(referred) in self._writing:
                self._recursive.add(id(referred))
            if id(referred) not in self._recursive:
                count += self._written_out(referred, way + 1)
            if count > _MOST_WRITTEN_OUT:
                raise _Unfit(f"it has more than {_MOST_WRITTEN_OUT} values with its references written out")
        self._writing.remove(id(schema))
        self._written[id(schema)] = count
        return count

    def _references(self, schema: Schema) -> Iterator[Schema]:
        """What all parts of it refer to, without its definitions."""
        left = [schema]
        while left:
            part = left.pop()
            if "$ref" in part:
                yield from _schemas([self._referred(part["$ref"])])
            left += _schemas((*_combined(part), *_inside(part)))


def _combined(schema: Schema) -> Iterator[Any]:
    """The schemas in it that apply to the same value."""
    for name in _HERE:
        yield from _list(schema.get(name))
    yield from (schema[name] for name in _HERE_TOO if name in schema)
    yield from _named(schema, _HERE_BY_NAME)


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
    """Those that are; `true` and `false` say nothing more."""
    return (cast(Schema, value) for value in values if isinstance(value, Mapping))


def _values(root: Any) -> Iterator[Any]:
    left = [root]
    while left:
        value = left.pop()
        yield value
        left += _children(value)


def _deeper(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [child for parent in level for child in _children(parent)]
        if len(level) > _MOST_BYTES:
            # So many do not fit anyway, and an author's schema may hold itself.
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


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


# --- the process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Read `[schema, value]`; write whether the value fits, then, on a line of its own, what does not."""
    schema, value = json.load(sys.stdin)
    _be_bounded()
    try:
        checked = validator(schema)
        fits = checked.is_valid(value)
    except (ValueError, RecursionError) as error:
        _say({"broken": _shown(str(error))})
        return
    _say({"fits": fits})
    if not fits:
        # The list of all that is wrong can be without end though the answer was quick.
        _say([_told(error) for error, _ in zip(checked.iter_errors(value), range(5), strict=False)])


def _told(error: Any) -> str:
    return f"{_place(error.instance_path)}: {_shown(error.message)}"


def _place(path: list[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _be_bounded() -> None:
    """The system ends this process when it has taken too much, also when its worker is gone by then."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not everywhere

        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
        for what, limit in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, spent + _SECONDS),
            (resource.RLIMIT_AS, _BYTES),
        ):
            resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
