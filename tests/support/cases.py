"""Cases of a parametrised test that only `make chaos` runs: `slow_where` says which, by their parameters.

Where two dimensions meet no code that each does not meet alone, `make test` runs some pairs of them and `make chaos`
runs all. A case without one of the parameters that are asked for is not slow.
"""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import pytest


# First: what is slow is chosen or left out by its mark.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(_holds(mark.args[0], parameters_of(item)) for mark in item.iter_markers("slow_where")):
            item.add_marker(pytest.mark.slow)


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    """The values of its parameters."""
    called = getattr(item, "callspec", None)
    return {} if called is None else cast("Mapping[str, Any]", called.params)


def _holds(condition: Any, parameters: Mapping[str, Any]) -> bool:
    names = inspect.signature(condition).parameters
    return set(names) <= set(parameters) and condition(**{name: parameters[name] for name in names})
