"""The text that the databases hold is read as the standard library reads it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.bounds import repaired
from perdure.store.engine.rows import decode, encode

_TEXT = st.text(st.characters(codec=None), max_size=8)
_NUMBERS = st.integers() | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


def _nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@given(VALUES)
def test_every_value_is_read_as_the_standard_library_reads_it(value: object) -> None:
    text = encode(value)
    assert repr(decode(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", [_nested(300), '"\\ud800"', "1e400", '{"a": 1, "a": 2}', "-0.0", "9" * 4000])
def test_unusual_text_is_read(text: str) -> None:
    assert repr(decode(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["", "{", "[1,]", "01", "1 2", "\ufeff1"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@given(VALUES)
def test_a_repaired_value_can_be_encoded_and_is_otherwise_unchanged(value: object) -> None:
    result = repaired(value)
    json.dumps(result, allow_nan=False, ensure_ascii=False).encode()
    if not _is_broken(value):
        assert repr(result) == repr(value)


def _is_broken(value: object) -> bool:
    match value:
        case str():
            return any("\ud800" <= each <= "\udfff" for each in value)
        case float():
            return not math.isfinite(value)
        case dict():
            return any(_is_broken(each) for each in (*value, *value.values()))
        case list():
            return any(map(_is_broken, value))
        case _:
            return False
