"""Which schemas are taken, and how quickly that is known."""

import contextlib
import math
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import given as examples
from hypothesis import strategies as st

from perdure.agents.output_schema import problem, validator
from tests.support.examples import at_least

TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


def doubled(levels: int) -> Any:
    """Each level is the next one, twice."""
    two = {f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**two, f"a{levels}": {"type": "object"}}}


def branching(levels: int, last: Any = True) -> Any:
    """Each level has the next one in two places."""
    two = {
        f"a{level}": {"properties": {name: {"$ref": f"#/$defs/a{level + 1}"} for name in "xy"}}
        for level in range(levels)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**two, f"a{levels}": last}}


def nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chained(levels: int) -> Any:
    links = {f"a{level}": {"$ref": f"#/$defs/a{level + 1}"} for level in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{levels}": {}}}


def descending(levels: int) -> Any:
    """Each level is a part of the one before."""
    links = {f"a{level}": {"items": {"$ref": f"#/$defs/a{level + 1}"}} for level in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{levels}": {}}}


def grammar(kinds: int) -> Any:
    """Each kind may have parts of all kinds, as in a language."""
    anything = {"anyOf": [{"$ref": f"#/$defs/k{kind}"} for kind in range(kinds)]}
    return {"$ref": "#/$defs/k0", "$defs": {f"k{kind}": {"properties": {"part": anything}} for kind in range(kinds)}}


USABLE: dict[str, Any] = {
    "nothing": {},
    "an object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "a tree": TREE,
    "definitions": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"type": "integer"}}},
    "an older draft": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}},
    "an id": {"$id": "https://example.com/schema", "type": "object"},
    "a pattern": {"type": "string", "pattern": r"^\w+([.-]\w+)*@\w+\.\w{2,}$"},
    "a large pattern among small ones": {
        "properties": {
            "name": {"pattern": r"^[\p{L}\p{N} ._-]{1,20}$"},
            **{f"code{number}": {"pattern": f"^[A-Z]{{2}}-{number}[0-9]+$"} for number in range(20)},
        }
    },
    "a pattern that backtracks elsewhere": {"type": "string", "pattern": "^(a+)+$"},
    "a property of a telling name": {"properties": {"$id": {"type": "string"}, "$ref": {"type": "string"}}},
    "a value that looks like a reference": {"enum": [{"$ref": "https://example.com"}]},
    "a long enumeration": {"enum": [f"value {number}" for number in range(2_000)]},
    "parts that branch": branching(10),
    "parts of parts": descending(150),
    "a grammar": grammar(30),
    "an alternative of many": {"oneOf": [{"const": number} for number in range(1_000)]},
}


_ITSELF: dict[str, Any] = {}
_ITSELF["items"] = _ITSELF

UNUSABLE: dict[str, tuple[Any, str]] = {
    "of no type": ({"type": "nonsense"}, "is not valid"),
    "wrong deep within": ({"properties": {"a": {"type": ["string", 4]}}}, "is not valid"),
    "levels that double": (doubled(12), "apply to one value"),
    "parts that double": (branching(40), "more than 100000 values with its references written out"),
    "parts that double in a loop": (
        branching(40, {"items": {"$ref": "#/$defs/a0"}}),
        "more than 100000 values with its references written out",
    ),
    "a way that is too long": (descending(300), "more than 200 of its references lead from one to the next"),
    "a loop": ({"$ref": "#"}, "without end"),
    "a longer loop": ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#"}}}}, "without end"),
    "a long way": (chained(60), "lead from one to the next"),
    "a reference to nothing": ({"items": {"$ref": "#/$defs/a"}}, "does not exist"),
    "a reference to elsewhere": ({"items": {"$ref": "https://example.com/a"}}, "leads out of it"),
    "a file": ({"$ref": "file:///etc/passwd"}, "leads out of it"),
    "a reference that is none": ({"$ref": 5}, "leads out of it"),
    "an anchor": ({"$dynamicRef": "#a"}, "not supported"),
    "a second id": ({"items": {"$id": "https://example.com/a"}}, "$id"),
    "an unknown dialect": ({"$schema": "https://example.com/schema"}, "Unknown"),
    "no pattern": ({"pattern": "("}, "regex"),
    "a pattern that looks ahead": ({"pattern": "(?=a)b"}, "regex"),
    "a pattern that explodes": ({"pattern": "(a{1000}){1000}"}, "regex"),
    "a long pattern": ({"patternProperties": {"a" * 2_000: {}}}, "longer than"),
    "many patterns that explode": (
        {"allOf": [{"pattern": f"[\\p{{L}}\\p{{N}}{number}]{{19}}"} for number in range(50)]},
        "too large together",
    ),
    "many patterns": ({"allOf": [{"pattern": f"a{number}"} for number in range(60)]}, "more than 50 patterns"),
    "large": ({"title": "x" * 70_000}, "larger than"),
    "many values": ({"enum": list(range(6_000))}, "more than 5000 values"),
    "deep": (nested(101), "deeper"),
    "itself": (_ITSELF, "deeper"),
    "no JSON": ({"const": float("nan")}, "not JSON"),
    "half a character": ({"const": "\ud800"}, "not JSON"),
    "a set": ({"enum": {1, 2}}, "not JSON"),
}


@pytest.mark.parametrize("schema", USABLE.values(), ids=USABLE)
def test_a_schema_of_common_form_is_taken(schema: Any) -> None:
    assert problem(schema) is None


@pytest.mark.parametrize(("schema", "says"), UNUSABLE.values(), ids=UNUSABLE)
def test_another_one_is_refused_at_once(schema: Any, says: str) -> None:
    began = time.process_time()

    assert says in str(problem(schema))

    assert time.process_time() - began < 1


def test_problems_are_reported_with_their_place() -> None:
    found = problem({"type": "object", "properties": {"total": {"type": "nummber"}}})

    assert found is not None
    assert '"nummber"' in found
    assert found.endswith("(at $.properties.total.type)")


names = st.sampled_from(["a", "b", "", "$ref", "\0", "\U0001f600", "x" * 2_000])
patterns = st.sampled_from(["", ".*", "^(a+)+$", r"\p{L}", "(?i)x", "(", "[", "a{9999}", "(?=a)b", "\ud800"])
counts = st.integers(-1, 3) | st.sampled_from([10**400, 1.0, 1e300])
references = st.sampled_from(["#", "#/", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/allOf/0", "http://x/", ""])
dialects = st.sampled_from(
    [f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)]
    + [f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12", "9999")]
)
atoms: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([10**400, -(2**63) - 1, 1.5, 1e308, 1e-300, math.nan, math.inf])
    | names
    | st.text(st.characters(), max_size=5)
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(names | st.just("type"), inner, max_size=4)


values: st.SearchStrategy[Any] = st.recursive(atoms, _larger, max_leaves=10)


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """As one should be, but for a change in it now and then."""
    kinds = st.sampled_from(["object", "array", "string", "integer", "null", "nonsense"])
    alternatives = st.lists(inner, min_size=1, max_size=3)
    parts = st.dictionaries(names, inner, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], alternatives),
        **dict.fromkeys(["items", "contains", "additionalProperties", "propertyNames", "not", "if", "then"], inner),
        **dict.fromkeys(["unevaluatedProperties", "unevaluatedItems"], inner),
        **dict.fromkeys(["properties", "dependentSchemas", "$defs", "definitions"], parts),
        **dict.fromkeys(["minLength", "maxItems", "minContains", "minimum", "multipleOf"], counts),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "type": kinds | st.lists(kinds, max_size=3),
        "$ref": references,
        "$schema": dialects,
        "$id": names,
        "pattern": patterns,
        "enum": st.lists(values, max_size=3),
        "const": values,
        "required": st.lists(names, max_size=3),
        "uniqueItems": st.booleans(),
    }
    named = st.sampled_from(sorted(keywords)).flatmap(lambda name: st.tuples(st.just(name), keywords[name] | values))
    usual = st.sampled_from(sorted(keywords)).flatmap(lambda name: st.tuples(st.just(name), keywords[name]))
    return st.lists(usual, max_size=4).map(dict) | st.lists(usual | named, max_size=3).map(dict)


def _defining(a: Any, b: Any, schema: Any) -> Any:
    return {"$defs": {"a": a, "b": b}, **schema}


inner: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.builds(dict[str, Any]), _schema, max_leaves=6)
schemas = st.builds(_defining, _schema(st.booleans()), _schema(st.booleans()), _schema(inner))
_QUIETLY = settings(
    max_examples=at_least(50), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@_QUIETLY
@examples(schemas | st.dictionaries(names, values))
def test_whatever_a_schema_is_an_answer_comes_at_once(schema: Any) -> None:
    began = time.process_time()

    assert isinstance(problem(schema), str | None)

    assert time.process_time() - began < 1


@_QUIETLY
@examples(schemas, st.lists(values, min_size=1, max_size=4))
def test_with_a_schema_that_is_taken_every_value_can_be_compared(schema: Any, results: list[Any]) -> None:
    assume(problem(schema) is None)
    compared = validator(schema)

    for result in results:
        # What the process says that compares them: that it fits, what does not, or that the schema is broken.
        with contextlib.suppress(ValueError, RecursionError):
            fits = compared.is_valid(result)
            assert fits is (next(compared.iter_errors(result), None) is None)
