"""Workers for workflows, over activities that a test scripts. Each test runs with turns of both kinds."""

import pytest

from perdure.runtime.connect import temporal_client
from perdure.settings import Settings
from tests.support.stack import TemporalServer
from tests.support.workflows import Bench
from tests.support.workflows import outside as outside
from tests.support.workflows import working as working


@pytest.fixture(params=["child", "inline"])
async def bench(request: pytest.FixtureRequest, temporal_server: TemporalServer) -> Bench:
    return Bench(await temporal_client(Settings(temporal_address=temporal_server.address)), request.param)
