"""The cells of the table in docs/resuming.md, by their names."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tests.support.chaos.world import World

Cell: TypeAlias = Callable[[World], Awaitable[None]]
CELLS: dict[str, Cell] = {}


def cell(state: str, event: str) -> Callable[[Cell], Cell]:
    def named(check: Cell) -> Cell:
        CELLS[f"{state}/{event}"] = check
        return check

    return named
