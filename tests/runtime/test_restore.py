"""What becomes of an open session that no workflow drives."""

import logging

import pytest
from temporalio.client import WorkflowExecutionStatus

from perdure.errors import Unavailable
from perdure.runtime.drivers.lost import start_lost_driver
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from tests.runtime.fake_driver import RUNNING, FakeDriver
from tests.support import given

ENDED = [
    (WorkflowExecutionStatus.TERMINATED, "WORKFLOW_TERMINATED", "SESSION_TERMINATED"),
    (WorkflowExecutionStatus.CANCELED, "WORKFLOW_CANCELLED", "SESSION_CANCELLED"),
    (WorkflowExecutionStatus.FAILED, "WORKFLOW_FAILED", None),
    (WorkflowExecutionStatus.TIMED_OUT, "WORKFLOW_FAILED", None),
    (None, "WORKFLOW_LOST", None),
]


@pytest.mark.parametrize(("status", "reason", "ends"), ENDED)
async def test_an_open_session_without_a_workflow_is_started_from_the_store(
    store: Store,
    status: WorkflowExecutionStatus | None,
    reason: str,
    ends: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    if status is not None:
        driver.workflows["s"] = status

    with caplog.at_level(logging.WARNING):
        await start_lost_driver(store, driver, await given.read_session(store))

    rebuild = driver.rebuilt["s"]
    assert rebuild.reason == reason
    assert (rebuild.ends and rebuild.ends.code) == ends
    assert reason in caplog.text


@pytest.mark.parametrize("status", [RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW])
async def test_a_workflow_that_runs_is_left_alone(store: Store, status: WorkflowExecutionStatus) -> None:
    driver = FakeDriver()
    driver.workflows["s"] = status

    await start_lost_driver(store, driver, await given.read_session(store))

    assert driver.calls == []
    assert (await given.read_session(store)).attention is None


async def test_a_workflow_that_ended_by_itself_shows_that_the_store_is_older(store: Store) -> None:
    driver = FakeDriver()
    driver.workflows["s"] = WorkflowExecutionStatus.COMPLETED

    for _ in range(2):
        await start_lost_driver(store, driver, await given.read_session(store))

    row = await given.read_session(store)
    assert row.attention is not None
    assert row.attention["code"] == "STORE_BEHIND"
    assert driver.rebuilt == {}
    assert [event.type for event in await given.everything(store)][1:] == ["session.attention"]


async def test_a_session_that_ended_while_it_was_looked_at_needs_no_attention(store: Store) -> None:
    driver = FakeDriver()
    driver.workflows["s"] = WorkflowExecutionStatus.COMPLETED
    before = await given.read_session(store)
    await store.commit(given.closing())

    await start_lost_driver(store, driver, before)

    assert (await given.read_session(store)).attention is None
    assert (await given.keys(store))[-1] == "session/completed"


async def test_while_temporal_is_away_nothing_is_made_of_it(store: Store, driver: FakeDriver, signals: Signals) -> None:
    driver.away = True

    with pytest.raises(Unavailable):
        await start_lost_driver(store, driver, await given.read_session(store))

    assert (await given.read_session(store)).attention is None
