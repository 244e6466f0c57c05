"""The parts of the API tests."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from tests.api.asking import by_header
from tests.api.served import Api, serving


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncGenerator[Api]:
    """The API as a developer runs it: on the loopback, with no key set."""
    async with serving(tmp_path) as served:
        yield served


@pytest_asyncio.fixture
async def people(tmp_path: Path) -> AsyncGenerator[Api]:
    """An API that several people use; who says nothing else is Ada."""
    async with serving(tmp_path, authenticators=[by_header]) as served:
        served.http.headers["x-who"] = "ada"
        yield served
