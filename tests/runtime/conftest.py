"""A store with one session, and Temporal in memory."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.open import open_store
from tests.runtime.fake_driver import FakeDriver
from tests.support import given
from tests.support.workflows import bench as bench
from tests.support.workflows import outside as outside
from tests.support.workflows import working as working


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    """A store with one session, `s`, which has had a turn."""
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    await store.create_session(given.session())
    await store.commit(given.ending())
    yield store
    await store.close()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver("s")


@pytest.fixture
def signals(store: Store, driver: FakeDriver) -> Signals:
    return Signals(store, driver)
