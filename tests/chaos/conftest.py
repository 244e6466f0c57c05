"""A world for each module; a test that leaves it broken fails."""

from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.chaos.world import World, running_world
from tests.support.stack import TemporalServer


@pytest.fixture(scope="module")
def settings_of_all() -> dict[str, str]:
    """The environment of all parts, for modules that want another one."""
    return {}


@pytest.fixture(scope="module")
def shared_world(
    request: pytest.FixtureRequest,
    settings_of_all: dict[str, str],
    temporal_server: TemporalServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[World]:
    """No worker yet: each test starts those that it wants to see die.

    Modules that break Temporal, too, say so (`BREAKS_TEMPORAL`), and have a server of their own.
    """
    breaks: bool = getattr(cast(Any, request).module, "BREAKS_TEMPORAL", False)
    temporal = None if breaks else temporal_server
    with running_world(tmp_path_factory.mktemp("chaos"), settings_of_all, workers=0, temporal=temporal) as world:
        yield world


@pytest.fixture
async def world(shared_world: World) -> AsyncGenerator[World]:
    """The module's world; all invariants are checked when the test is through."""
    yield shared_world
    await shared_world.check()


@pytest.fixture
async def shared_out(tmp_path: Path, postgres_url: str) -> AsyncGenerator[World]:
    """Two APIs and two workers (which the test starts) on one PostgreSQL."""
    with running_world(tmp_path, workers=0, apis=2, database_url=postgres_url) as world:
        yield world
        await world.check()
