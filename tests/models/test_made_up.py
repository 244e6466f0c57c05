"""What the demo makes up fits its schema, and says what the user said where it may."""

from typing import Any

import pytest

from perdure.agents.output_schema import validator
from perdure.models.demo import Unfit, made_up

SAID = "Tell me of 3 blue whales"

FITTING: list[tuple[dict[str, Any], Any]] = [
    ({"type": "string"}, SAID),
    ({"type": "string", "maxLength": 4}, "Tell"),
    ({"type": ["null", "string"]}, SAID),
    ({"type": "integer"}, 3),
    ({"type": "integer", "minimum": 5}, 5),
    ({"type": "integer", "maximum": -2}, -2),
    ({"type": "boolean"}, True),
    ({"type": "null"}, None),
    ({"const": {"a": 1}}, {"a": 1}),
    ({"enum": ["red", "blue"]}, "blue"),
    ({"enum": [7, 8]}, 7),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, SAID),
    ({"type": "array", "items": {"type": "string"}}, []),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
    ({"type": "object"}, {}),
    ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, {"b": SAID}),
    ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}, {"a": 3}),
    (
        {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/Tree"}},
            "required": ["tree"],
            "$defs": {
                "Tree": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Tree"}},
                    "required": ["name"],
                }
            },
        },
        {"tree": {"name": SAID}},
    ),
]


@pytest.mark.parametrize(("schema", "value"), FITTING, ids=[str(schema)[:60] for schema, _ in FITTING])
def test_what_is_made_up_fits(schema: dict[str, Any], value: Any) -> None:
    found = made_up(schema, SAID)

    assert found == value
    assert validator(schema).is_valid(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "string", "pattern": "^x{40}y$"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/$defs/nothing"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#"},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "array", "minItems": 10, "items": {"$ref": "#"}},
        {"type": "nonsense"},
        {"type": "array", "minItems": 10**12},
        {"type": "string", "minLength": 10**12},
        {"anyOf": [{"type": "array", "minItems": 1, "items": {"$ref": "#"}}] * 9},
        {"anyOf": [{"type": "array", "minItems": 1, "items": {"allOf": [{"$ref": "#"}] * 3}}] * 9},
        {"type": "string", "pattern": "^(([a-z. 0-9A-Z])+.)+X$", "minLength": 60},
    ],
    ids=str,
)
def test_the_error_explains_when_no_value_is_found(schema: dict[str, Any]) -> None:
    with pytest.raises(Unfit):
        made_up(schema, SAID)
