"""What sessions and runs are given by trusted code: plain JSON of a bounded size; dispatched, it is a message."""

import json
from typing import Any

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from perdure.bounds import DEEPEST, deeper_than, repaired
from perdure.errors import Invalid, TooLarge

#: The largest input, in bytes of JSON: as much as the result of a run may have. Each attempt reads it.
LARGEST_INPUT = 1_048_576
_LONGEST_ID = 255
_LONGEST_TARGET = 4_000

_JSON = TypeAdapter[Any](JsonValue, config=ConfigDict(allow_inf_nan=False, hide_input_in_errors=True))


def check_names(to: str, dispatch_id: str | None) -> None:
    """Raise `Invalid` unless both can be kept."""
    if dispatch_id is not None and not (0 < len(dispatch_id) <= _LONGEST_ID and dispatch_id.isprintable()):
        raise Invalid(f"A dispatch id has 1 to {_LONGEST_ID} printable characters.")
    if not (0 < len(to) <= _LONGEST_TARGET and to.isprintable()):
        raise Invalid(
            f"A dispatch names a session by its id, a token or a name: 1 to {_LONGEST_TARGET} printable characters."
        )


def bounded_input(value: Any) -> Any:
    """The JSON value as it can be stored; `TooLarge` when it has too many bytes."""
    value = repaired(value)
    if (size := len(to_json(value))) > LARGEST_INPUT:
        raise TooLarge(f"The input has {size} bytes as JSON; {LARGEST_INPUT} are allowed.")
    return value


def plain_json(input: Any) -> Any:
    """The input as it can be stored; `Invalid` when it is no plain JSON."""
    if deeper_than(input, DEEPEST):
        raise Invalid(f"The input is nested deeper than {DEEPEST} levels, or holds itself.")
    try:
        plain = _JSON.validate_python(input, strict=True)
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False, include_input=False)[0]["msg"]
        raise Invalid(f"The input is not plain JSON: {problem}.") from None
    return bounded_input(plain)


def text_of(input: Any) -> str:
    """The input as a message: text as it is, anything else as JSON; `Invalid` when it is no plain JSON."""
    plain = plain_json(input)
    if isinstance(plain, str) and plain:
        return plain
    try:
        return json.dumps(plain, ensure_ascii=False)
    except ValueError:
        # Python writes no number of more than some thousands of digits.
        raise Invalid("The input holds a number with too many digits.") from None
