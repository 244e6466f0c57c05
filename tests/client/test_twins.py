"""The client with an event loop and the one without it: what the one can, the other can."""

import inspect

import pytest

from perdure.client import AsyncClient, AsyncSession, AsyncTurn, Client, Session, Turn

#: Of a session, for its own turns.
INTERNAL = {"advance"}


def methods(of: type) -> dict[str, list[tuple[str, object, object]]]:
    """The public methods and properties, and what a method takes: names, kinds and defaults."""
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name in dir(of):
        member = inspect.getattr_static(of, name)
        if name == "__init__" or not name.startswith("_"):
            taken = inspect.signature(member).parameters.values() if inspect.isfunction(member) else ()
            found["close" if name == "aclose" else name] = [(each.name, each.kind, each.default) for each in taken]
    return found


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Session, AsyncSession), (Turn, AsyncTurn)])
def test_both_clients_have_the_same_methods_with_the_same_arguments(blocking: type, awaited: type) -> None:
    ours, theirs = methods(blocking), methods(awaited)

    assert ours.keys() == theirs.keys() - INTERNAL
    # Sessions and turns are made by a client, and not by their users.
    made = {} if blocking is Client else {"__init__": ours["__init__"]}
    assert ours == {name: made.get(name, taken) for name, taken in theirs.items() if name not in INTERNAL}
