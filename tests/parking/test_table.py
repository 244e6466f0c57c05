"""Every cell of the table in docs/resuming.md that people and time bring about, over HTTP on one stack."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.chaos.world import World

from . import others, people, silence
from .cells import CELLS
from .recovery import AFTER_A_CRASH, AFTER_A_DEPLOY
from .states import STATES, world_of_states

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    with world_of_states(tmp_path_factory.mktemp("table")) as world:
        world.stack.start_worker()
        yield world


# Importing them fills the table.
_FILLED_BY = (people, silence, others)


@pytest.mark.parametrize("name", CELLS)
async def test_cell(shared_world: World, name: str) -> None:
    await CELLS[name](shared_world)


async def test_everything_holds_after_all_of_it(shared_world: World) -> None:
    await shared_world.check()


def test_the_docs_have_the_cells_that_are_tested() -> None:
    crash = {f"{state}/a crash" for state in AFTER_A_CRASH}
    deploy = {f"{state}/a deploy" for state in AFTER_A_DEPLOY}

    assert documented() == CELLS.keys() | crash | deploy


def documented() -> set[str]:
    """The cells of the first table of the page that say something."""
    page = (Path(__file__).parents[2] / "docs" / "resuming.md").read_text()
    rows = [[part.strip() for part in line.strip("|\n").split("|")] for line in page.splitlines() if line[:1] == "|"]
    head, _, *states = rows[: 2 + len(STATES)]
    return {f"{state}/{event}" for state, *cells in states for event, cell in zip(head[1:], cells, strict=True) if cell}
