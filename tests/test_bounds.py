"""Values are repaired so that they can be stored, sent and read."""

import json
import math
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from perdure.bounds import repaired

_TEXT = st.text(st.characters(codec=None), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_a_repaired_value_can_be_encoded_and_is_otherwise_unchanged(value: Any) -> None:
    result = repaired(value)
    json.dumps(result, allow_nan=False, ensure_ascii=False).encode()
    if not _is_broken(value):
        assert repr(result) == repr(value)


def test_words_that_look_like_numbers_stay() -> None:
    assert repaired({"NaN": ["Infinity", "-Infinity"]}) == {"NaN": ["Infinity", "-Infinity"]}


def test_what_is_broken_is_replaced_where_it_is() -> None:
    assert repaired({"a": [math.nan, 1.5], "b": "x\ud800"}) == {"a": [None, 1.5], "b": "x\ufffd"}


def _is_broken(value: Any) -> bool:
    match value:
        case str():
            return any("\ud800" <= each <= "\udfff" for each in value)
        case float():
            return not math.isfinite(value)
        case dict():
            known = cast("dict[str, Any]", value)
            return any(_is_broken(each) for each in (*known, *known.values()))
        case list():
            return any(map(_is_broken, cast("list[Any]", value)))
        case _:
            return False
