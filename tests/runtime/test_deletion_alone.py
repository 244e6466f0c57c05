"""Deletions of sessions whose workers or whose Temporal are not there."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.client import Client

from perdure.runtime import deletions
from perdure.runtime.deletions import Deletions
from perdure.runtime.drivers.lost import start_lost_driver
from perdure.runtime.reconciler import Reconciler
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.runs import NewRun
from perdure.store.values import Commit, SessionRow
from tests.runtime.fake_driver import RUNNING, FakeDriver
from tests.support import given
from tests.support.waiting import until


@dataclass
class Lists:
    """Temporal's client, and what it lists at each look; nothing after that."""

    looks: list[list[str]] = field(default_factory=list[list[str]])
    namespace: str = "default"

    async def list_workflows(self, query: str, **_: Any) -> AsyncGenerator[Any]:
        for each in self.looks.pop(0) if self.looks else []:
            yield SimpleNamespace(id=each, run_id="r")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "SETTLED", 0.0)


def deleting_with(store: Store, driver: FakeDriver, stop: float = 45.0, *, lists: Lists | None = None) -> Deletions:
    return Deletions(store, driver, cast("Client", lists or Lists()), stop=stop)


async def test_a_turn_is_asked_to_stop_before_its_session_is_deleted(store: Store, driver: FakeDriver) -> None:
    await store.commit(given.running(1))

    deletion = await deleting_with(store, driver).delete("s", None, patience=0.0)

    assert deletion.finished_at is None
    assert driver.signalled() == ["fail OPERATOR"]
    row = await given.read_session(store)
    assert (row.cancel_turn, row.ended) == (1, False)


async def test_a_turn_that_no_worker_stops_is_ended_without_one(store: Store, driver: FakeDriver) -> None:
    await store.commit(given.running(1))

    deletion = await deleting_with(store, driver, stop=0.0).delete("s", None, patience=5.0)

    assert deletion.finished_at is not None
    assert await store.session("s") is None


async def test_the_sweeper_finishes_what_was_begun(store: Store, driver: FakeDriver) -> None:
    await store.begin_deletion("s")
    driver.away = True
    resumed = deleting_with(store, driver)

    await resumed.sweep()
    assert await store.unfinished_deletions(10) == ["s"]
    driver.away = False
    await resumed.sweep()

    assert await store.unfinished_deletions(10) == []


async def test_an_execution_that_is_listed_late_is_deleted_before_the_receipt(
    store: Store, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "SETTLED", 0.2)
    await store.begin_deletion("s")
    lists = Lists([[], ["s"], ["s"], []])
    deleting = deleting_with(store, driver, lists=lists)

    while lists.looks:
        await deleting.sweep()
        assert await store.unfinished_deletions(10) == ["s"]

    async def finished() -> bool:
        await deleting.sweep()
        return await store.unfinished_deletions(10) == []

    await until(finished, "the receipt")
    receipt = await store.deletion("s")
    assert receipt is not None
    assert receipt.counts["executions"] == 1


async def test_the_receipt_counts_what_another_process_has_deleted(store: Store, driver: FakeDriver) -> None:
    await store.begin_deletion("s")
    # It has died, or is slower than the one that sees an empty list.
    await deleting_with(store, driver, lists=Lists([["s", "s/turn/0"]])).sweep()
    await deleting_with(store, driver).sweep()

    receipt = await store.deletion("s")
    assert receipt is not None
    assert receipt.finished_at is not None
    assert receipt.counts["executions"] == 2


async def test_one_that_fails_does_not_stop_the_others(
    store: Store, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    await store.create_session(given.session("t"))
    for each in ("s", "t"):
        await store.begin_deletion(each)
    driver.failures["s"] = RuntimeError("broken")

    await deleting_with(store, driver).sweep()

    assert await store.unfinished_deletions(10) == ["s"]
    assert "session s could not be deleted" in caplog.text


async def test_a_session_with_many_rows_does_not_hold_its_caller(store: Store, driver: FakeDriver) -> None:
    for number in range(3):
        events = [given.event(f"{number}/{each}") for each in range(500)]
        await store.commit(Commit("s", events=events))
    deleting = deleting_with(store, driver)

    first = await deleting.delete("s", None, patience=0.0)

    assert first.finished_at is None
    assert await store.session("s") is None
    assert await store.events("s")
    await deleting.sweep()
    assert await store.unfinished_deletions(10) == []


# --- workflows that are started while their sessions are deleted ----------------------------------------------


async def deleted(store: Store) -> SessionRow:
    """The row of a session that was there when it was read, and is deleted now."""
    row = await given.read_session(store)
    await store.begin_deletion("s")
    await store.commit(given.closing())
    while not await store.purge("s", 100):
        pass
    await store.finish_deletion("s", executions=1)
    return row


async def test_no_workflow_is_left_of_a_session_that_was_deleted_while_it_was_started(store: Store) -> None:
    row = await deleted(store)
    driver = FakeDriver()

    assert await start_lost_driver(store, driver, row) == "it was deleted meanwhile"
    assert driver.workflows == {}


async def test_no_workflow_is_left_of_a_fork_that_was_deleted_while_it_was_started(store: Store) -> None:
    row = await deleted(store)
    driver = FakeDriver()

    await Signals(store, driver).start_with_turns(row)

    assert driver.signalled() == ["start"]
    assert driver.workflows == {}


async def test_a_deletion_that_has_still_to_look_for_workflows_ends_them_itself(store: Store) -> None:
    await store.begin_deletion("s")
    driver = FakeDriver()

    await start_lost_driver(store, driver, await given.read_session(store))

    # It stops the turn that may run before.
    assert driver.workflows == {"s": RUNNING}


async def test_a_workflow_whose_starter_died_is_found_when_its_session_was_deleted(store: Store) -> None:
    await deleted(store)
    driver = FakeDriver("s", "of another store")

    found = await Reconciler(store, driver).reconcile()

    assert found.orphans == ["of another store"]
    assert driver.workflows == {"of another store": RUNNING}


async def test_runs_go_before_the_sessions_of_their_owner_which_they_could_start(
    store: Store, driver: FakeDriver
) -> None:
    run = replace(given.session("run_1"), mode="task", token_hash="run/run_1", run=NewRun("nightly", {}))
    await store.create_session(run)

    assert [each async for each in deleting_with(store, driver).owned(given.ADA.owner)] == ["run_1", "s"]
