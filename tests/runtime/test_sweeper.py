"""Answers that nobody has told their session of."""

import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import Unavailable
from perdure.runtime.driver import Driver
from perdure.runtime.sweeper import Sweeper
from perdure.store.base import Commit, Store
from perdure.store.open import open_store
from tests.api.served import Recorder, until
from tests.store.given import answer, answering, opening, says, session


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    yield store
    await store.close()


async def stranded(store: Store, session_id: str = "s") -> None:
    """An answer that was counted by somebody who died before the signal."""
    await store.create_session(session(session_id))
    await store.commit(opening(f"r-{session_id}", session_id=session_id))
    given = answering((f"r-{session_id}", says("approve")), session_id=session_id, delivery_id=f"a-{session_id}")
    await answer(store, given)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sweeper(store: Store, temporal: Recorder, clock: Clock | None = None) -> Sweeper:
    # Less than nothing: what was accepted in this very moment is found too.
    return Sweeper(store, Driver(cast("Client", temporal)), older_than=-60, clock=clock or Clock())


def told(temporal: Recorder) -> list[str]:
    return [ref["id"] for _, _, ref in temporal.signals]


async def test_an_unheard_answer_is_told_again(store: Store) -> None:
    await stranded(store)
    temporal = Recorder()

    await sweeper(store, temporal).sweep()

    ((session_id, name, ref),) = temporal.signals
    assert (session_id, name, ref["id"], ref["kind"]) == ("s", "deliver", "a-s", "answer")


async def test_it_is_told_less_and_less_often(store: Store) -> None:
    await stranded(store)
    temporal, clock = Recorder(), Clock()
    sweeping = sweeper(store, temporal, clock)

    for second in range(3600):
        clock.now = float(second)
        if second % 5 == 0:
            await sweeping.sweep()

    assert 8 <= len(temporal.signals) <= 12


async def test_what_was_heard_is_left_alone(store: Store) -> None:
    await stranded(store)
    await store.commit(Commit("s", consume=["a-s"], consume_turn=1))
    temporal = Recorder()

    await sweeper(store, temporal).sweep()

    assert temporal.signals == []


async def test_while_temporal_is_away_nothing_is_lost(store: Store) -> None:
    await stranded(store)
    temporal = Recorder(failure=RPCError("away", RPCStatusCode.UNAVAILABLE, b""))
    sweeping = sweeper(store, temporal)
    with pytest.raises(Unavailable):
        await sweeping.sweep()
    temporal.failure = None

    await sweeping.sweep()

    assert told(temporal) == ["a-s"]


async def test_a_session_that_is_gone_is_told_to_its_readers_and_not_tried_again(store: Store) -> None:
    await stranded(store)
    temporal = Recorder(failure=RPCError("gone", RPCStatusCode.NOT_FOUND, b""))

    await sweeper(store, temporal).sweep()

    assert await store.unheard(kind="answer", older_than=-60) == []
    event = (await store.events("s"))[-1]
    assert event.data is not None
    assert (event.type, event.data["deliveryId"]) == ("delivery.refused", "a-s")


async def test_a_fault_does_not_end_the_sweep(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await stranded(store)
    temporal = Recorder(failure=ValueError("a fault of ours"))
    sweeping = Sweeper(store, Driver(cast("Client", temporal)), every=0.01, older_than=-60)

    async with sweeping.running():
        with caplog.at_level(logging.ERROR):
            await until(lambda: "the sweep failed" in caplog.text)
        temporal.failure = None
        await until(lambda: "a-s" in told(temporal))
