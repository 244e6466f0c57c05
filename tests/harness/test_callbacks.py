"""The callback of a session whose result cannot be sent."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from perdure.errors import UnreadableState
from perdure.harness.remote import callbacks
from perdure.harness.remote.callbacks import CallbackSender
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionChange
from tests.support import given

CALLBACK = {"callId": "c", "subagentName": "n", "token": "t", "url": "http://127.0.0.1:9/eve/v1/callback/t"}


@pytest.fixture
async def owing(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Store]:
    """A store with a session that has ended and owes a callback, with a result that this build cannot read."""

    async def output_of(*_: object) -> object:
        raise UnreadableState

    monkeypatch.setattr("perdure.harness.tools.children.output_of", output_of)
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    await store.create_session(replace(given.session(), callback=CALLBACK))
    await store.commit(Commit("s", change=SessionChange(status="completed"), close=True))
    yield store
    await store.close()


async def test_a_result_that_cannot_be_read_now_is_sent_later(owing: Store) -> None:
    await CallbackSender(owing).deliver("s")

    status = await owing.callback("s")
    assert status is not None
    assert (status.tries, status.settled) == (1, None)
    # After a pause, not at once.
    assert await owing.due_callbacks(10) == []


async def test_a_result_that_cannot_be_read_for_a_day_is_given_up(
    owing: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_LONGEST", -1.0)

    await CallbackSender(owing).deliver("s")

    status = await owing.callback("s")
    assert status is not None
    assert status.settled == "abandoned"
