"""Query parameters, read by hand and refused in plain words."""

from typing import Any

from perdure.errors import Invalid

_MOST = 200
_FEW = 50


def name(field: str, given: str | None) -> str | None:
    if given is not None and not given.isprintable():
        raise Invalid(f"Expected '{field}' to be a name.")
    return given


def one_of(name: str, choices: tuple[Any, ...], given: str | None) -> Any:
    if given is not None and given not in choices:
        raise Invalid(f"Expected '{name}' to be one of {', '.join(choices)}.")
    return given


def limit(given: str | None) -> int:
    if given is None:
        return _FEW
    if not (given.isascii() and given.isdecimal() and len(given) <= 3 and 1 <= int(given) <= _MOST):
        raise Invalid(f"Expected 'limit' to be an integer from 1 to {_MOST}.")
    return int(given)
