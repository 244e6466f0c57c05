"""Workers for workflows, over activities that a test scripts."""

from collections.abc import AsyncGenerator

import pytest

from perdure.runtime.connect import temporal_client
from perdure.settings import Settings
from tests.support.stack import TemporalServer

from .harness import Bench, Outside


@pytest.fixture
async def bench(temporal_server: TemporalServer) -> Bench:
    return Bench(await temporal_client(Settings(temporal_address=temporal_server.address)))


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
async def working(bench: Bench, outside: Outside) -> AsyncGenerator[None]:
    async with bench.working(outside):
        yield
