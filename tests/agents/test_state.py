"""Versions of an author's state slots."""

from typing import Any

import pytest
from pydantic import BaseModel

from perdure import State
from perdure.errors import InvalidDeclaration, UnreadableState


class Cart(BaseModel):
    items: dict[str, int] = {}


def named_to_counted(cart: Any) -> Any:
    """Version 1 was a list of names."""
    return {name: 1 for name in cart}


def counted_to_cart(cart: Any) -> Any:
    """Version 2 had no field for the items."""
    return {"items": cart}


CART = State("cart", Cart, version=3, migrate={1: named_to_counted, 2: counted_to_cart})


def fails(_: Any) -> Any:
    raise KeyError("secret")


def exits(_: Any) -> Any:
    raise SystemExit(3)


async def waits(cart: Any) -> Any:
    return cart


@pytest.mark.parametrize(
    ("stored", "items"),
    [
        (None, {}),
        ({"value": ["tea"]}, {"tea": 1}),
        ({"version": 2, "data": {"tea": 2}}, {"tea": 2}),
        ({"version": 3, "data": {"items": {"tea": 3}}}, {"tea": 3}),
    ],
)
def test_a_value_is_lifted_from_the_version_in_which_it_was_stored(stored: Any, items: dict[str, int]) -> None:
    assert CART.read(stored) == Cart(items=items)


def test_authors_can_try_their_migrators() -> None:
    assert CART.lift(["tea"]) == CART.lift({"tea": 1}, version=2)


@pytest.mark.parametrize("version", [4, 0, -1, "2", None, True, 1.0])
def test_a_version_that_this_code_does_not_know_is_refused(version: Any) -> None:
    with pytest.raises(UnreadableState, match=r"'cart' has version .*; this code reads versions 1 to 3\."):
        CART.read({"version": version, "data": {"items": {}}})


def test_a_value_in_another_form_is_refused() -> None:
    with pytest.raises(UnreadableState, match="has version None"):
        CART.read({"items": []})


@pytest.mark.parametrize("migrator", [fails, exits])
def test_a_migrator_that_raises_makes_the_value_unreadable_and_does_not_show_its_content(migrator: Any) -> None:
    state = State("cart", Cart, version=2, migrate={1: migrator})

    with pytest.raises(UnreadableState, match=r"of version 1 could not be lifted: (KeyError|SystemExit)") as raised:
        state.read({"value": []})

    assert "secret" not in raised.value.message


@pytest.mark.parametrize("value", [["tea"], None, {"items": 3}])
def test_a_value_that_does_not_fit_its_type_is_unreadable(value: Any) -> None:
    with pytest.raises(UnreadableState, match="'cart' of version 3 does not fit its type"):
        CART.lift(value, version=3)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"version": 2}, r"has version 2 and cannot lift version 1: add migrate=\{1: function\}"),
        ({"version": 3, "migrate": {1: fails}}, r"cannot lift version 2: add migrate=\{2: function\}"),
        (
            {"version": 2, "migrate": {1: fails, 2: fails}},
            "nothing is migrated from 2: remove .*, or raise the version",
        ),
        ({"migrate": {1: fails}}, "has version 1, so nothing is migrated from 1"),
        ({"version": 2, "migrate": {0: fails, 1: fails}}, "nothing is migrated from 0"),
        ({"version": 2, "migrate": {"1": fails}}, "nothing is migrated from '1'"),
        ({"version": 2, "migrate": {1: "fn"}}, r"migrate=\{1: function\} takes a plain function .*, not 'fn'"),
        ({"version": 2, "migrate": {1: waits}}, r"migrate=\{1: function\} takes a plain function"),
        ({"version": 2, "migrate": [fails]}, r"write migrate=\{1: function\}"),
        ({"version": 0}, "the version is a whole number, at least 1; not 0"),
        ({"version": "2"}, "the version is a whole number, at least 1; not '2'"),
        ({"version": True}, "the version is a whole number, at least 1; not True"),
    ],
)
def test_versions_that_cannot_work_are_refused_where_they_are_declared(options: Any, advice: str) -> None:
    with pytest.raises(InvalidDeclaration, match=f"^State 'cart'.*{advice}") as refused:
        State("cart", Cart, **options)

    assert "\n" not in refused.value.message
