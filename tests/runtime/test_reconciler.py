"""What the store and Temporal disagree about, and what is made of it."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import pytest
from temporalio.client import WorkflowExecutionStatus

from perdure.errors import Unavailable
from perdure.protocol.requests import Attention
from perdure.runtime.deploys.unserved import Run
from perdure.runtime.reconciler import Disagreement, Reconciler
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionChange
from tests.runtime.fake_driver import RUNNING, FakeDriver
from tests.support import given
from tests.support.waiting import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    """A store with three sessions, `a`, `b` and `c`, which have had a turn."""
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    for session_id in ("a", "b", "c"):
        await store.create_session(given.session(session_id))
        await store.commit(given.ending(session_id=session_id))
    yield store
    await store.close()


def reconciler(store: Store, driver: FakeDriver, every: float = 30.0) -> Reconciler:
    return Reconciler(store, driver, every=every)


async def test_where_both_agree_there_is_nothing_to_do(store: Store) -> None:
    driver = FakeDriver("a", "b", "c")

    assert await reconciler(store, driver).reconcile() == Disagreement(undriven=[], orphans=[], driven=3)
    assert driver.calls == []


async def test_open_sessions_without_a_workflow_are_started_from_the_store(store: Store) -> None:
    driver = FakeDriver("b")
    driver.workflows["c"] = WorkflowExecutionStatus.TERMINATED

    found = await reconciler(store, driver).reconcile()

    assert found.undriven == ["a", "c"]
    assert driver.signalled("a") == ["rebuild WORKFLOW_LOST"]
    assert driver.signalled("b") == []
    assert driver.signalled("c") == ["rebuild WORKFLOW_TERMINATED"]
    assert (await reconciler(store, driver).find()).undriven == []


async def test_an_ended_session_needs_no_workflow(store: Store) -> None:
    for session_id in ("a", "b", "c"):
        await store.commit(given.closing(session_id))
    driver = FakeDriver()

    found = await reconciler(store, driver).reconcile()

    assert ([*found.undriven], [*found.orphans]) == ([], [])


async def test_a_session_that_has_not_begun_is_left_to_the_sweeper(store: Store) -> None:
    await store.create_session(given.session("new"), given.delivery(session_id="new"))
    driver = FakeDriver("a", "b", "c")

    found = await reconciler(store, driver).reconcile()

    assert found.undriven == ["new"]
    assert driver.calls == []


async def test_a_list_that_lags_behind_does_no_harm(store: Store) -> None:
    class Lagging(FakeDriver):
        """Its list knows nothing yet of what runs."""

        async def running(self) -> AsyncIterator[str]:
            for each in ():
                yield each

    driver = Lagging("a", "b", "c")

    found = await reconciler(store, driver).reconcile()

    assert found.undriven == ["a", "b", "c"]
    assert driver.calls == []
    assert (await given.read_session(store, "a")).attention is None


async def test_a_session_that_ends_while_it_is_looked_at_is_left_alone(store: Store) -> None:
    class Ending(FakeDriver):
        async def status(self, session_id: str) -> WorkflowExecutionStatus | None:
            await store.commit(given.closing(session_id))
            return WorkflowExecutionStatus.COMPLETED

    driver = Ending("b", "c")

    await reconciler(store, driver).reconcile()

    assert (await given.read_session(store, "a")).attention is None
    assert driver.calls == []


async def test_a_workflow_that_ended_by_itself_shows_that_the_store_is_older(store: Store) -> None:
    driver = FakeDriver("b", "c")
    driver.workflows["a"] = WorkflowExecutionStatus.COMPLETED

    for _ in range(2):
        await reconciler(store, driver).reconcile()

    row = await given.read_session(store, "a")
    assert row.attention is not None
    assert row.attention["code"] == "STORE_BEHIND"
    assert [event.type for event in await given.everything(store, "a")][1:] == ["session.attention"]


async def test_one_that_fails_stops_none_of_the_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    driver.failures["a"] = ValueError("a fault of ours")

    with caplog.at_level(logging.ERROR):
        await reconciler(store, driver).reconcile()

    assert set(driver.rebuilt) == {"b", "c"}
    assert "session a could not be started from the store" in caplog.text


async def test_while_temporal_is_away_nothing_is_made_of_it(store: Store) -> None:
    driver = FakeDriver()
    driver.failures[""] = Unavailable()

    with pytest.raises(Unavailable):
        await reconciler(store, driver).reconcile()

    assert (await given.read_session(store, "a")).attention is None


async def test_one_session_that_cannot_be_reached_stops_none_of_the_others(store: Store) -> None:
    driver = FakeDriver()
    driver.failures["a"] = Unavailable()

    await reconciler(store, driver).reconcile()

    assert set(driver.rebuilt) == {"b", "c"}

    assert (await given.read_session(store, "a")).attention is None


async def test_no_session_is_started_on_a_queue_that_no_worker_polls(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    driver.workflows["c"] = WorkflowExecutionStatus.COMPLETED
    driver.no_workers = True
    looking = reconciler(store, driver)

    with caplog.at_level(logging.WARNING):
        found = [await looking.reconcile() for _ in range(3)][-1]

    assert driver.rebuilt == {}
    assert "waits for a worker" in found.mended["a"]
    assert [record.getMessage().count("once one does") for record in caplog.records].count(1) == 1
    # What needs no worker is done all the same.
    assert (await given.read_session(store, "c")).attention is not None
    driver.no_workers = False
    await looking.reconcile()
    assert set(driver.rebuilt) == {"a", "b"}


async def test_workflows_without_a_session_are_reported_once_and_left_running(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await store.commit(given.closing("c"))
    driver = FakeDriver("a", "b", "c", "stray", "lost")
    looking = reconciler(store, driver)

    with caplog.at_level(logging.WARNING):
        found = [await looking.reconcile() for _ in range(3)]

    # The workflow of an ended session is about to end by itself.
    assert [each.orphans for each in found] == [["lost", "stray"]] * 3
    assert len([record for record in caplog.records if "belong to no session" in record.getMessage()]) == 1
    assert "lost, stray" in caplog.text
    assert driver.calls == []


async def test_another_one_is_reported_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver("a", "b", "c", "stray")
    looking = reconciler(store, driver)
    await looking.reconcile()
    driver.workflows["lost"] = RUNNING
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        await looking.reconcile()

    assert "lost" in caplog.text


async def test_a_session_that_begins_in_between_is_no_orphan(store: Store) -> None:
    class Beginning(FakeDriver):
        async def running(self) -> AsyncIterator[str]:
            await store.create_session(given.session("new"))
            for each in ("a", "b", "c", "new"):
                yield each

    found = await reconciler(store, Beginning("a", "b", "c", "new")).find()

    assert ([*found.undriven], [*found.orphans]) == ([], [])


async def ended(driver: FakeDriver, names: Sequence[str]) -> bool:
    return all(driver.workflows[name] is WorkflowExecutionStatus.TERMINATED for name in names)


async def test_orphans_are_terminated_when_an_operator_asks_for_it(store: Store) -> None:
    driver = FakeDriver("a", "lost", "stray")
    looking = reconciler(store, driver)

    await looking.end_orphans((await looking.find()).orphans)

    assert await ended(driver, ["lost", "stray"])
    assert driver.workflows["a"] is RUNNING


async def test_an_orphan_that_has_ended_by_itself_stops_none_of_the_others(store: Store) -> None:
    driver = FakeDriver("stray")
    driver.workflows["lost"] = WorkflowExecutionStatus.COMPLETED

    await reconciler(store, driver).end_orphans(["lost", "stray"])

    assert await ended(driver, ["stray"])


async def test_more_sessions_than_one_look_finds_are_compared(store: Store) -> None:
    names = [f"s{n:04}" for n in range(1005)]
    for name in names:
        await store.create_session(given.session(name))
    driver = FakeDriver("a", "b", "c", *names[:-1])

    found = await reconciler(store, driver).find()

    assert (found.undriven, found.orphans) == (names[-1:], [])


async def test_a_fault_does_not_end_the_search(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(after: str, limit: int) -> Sequence[str]:
        raise ValueError("a fault of ours")

    driver = FakeDriver("b", "c")
    monkeypatch.setattr(store, "open_sessions", broken)

    async with reconciler(store, driver, every=0.01).running():
        with caplog.at_level(logging.ERROR):
            await until(lambda: "could not be compared" in caplog.text)
        monkeypatch.undo()
        await until(lambda: "a" in driver.rebuilt)


async def test_a_temporal_that_comes_back_is_looked_at_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver("b", "c")
    driver.away = True

    async with reconciler(store, driver, every=0.01).running():
        with caplog.at_level(logging.WARNING):
            await until(lambda: "cannot be compared now" in caplog.text)
        driver.away = False
        await until(lambda: "a" in driver.rebuilt)


# --- workflows that cannot be replayed ----------------------------------------------------------------------


async def test_they_wait_for_a_build_that_can_and_are_then_started_from_the_store(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver("a", "b", "c")
    driver.broken = {"a": Run("a", "run-1"), "b": Run("b/turn/3", "run-2")}
    looking = Reconciler(store, driver, replay_patience=0.05)

    await looking.reconcile()
    early = list(driver.calls)
    attention = [(await given.read_session(store, each)).attention for each in ("a", "b", "c")]
    driver.broken = None
    await looking.reconcile()
    # Temporal did not say: nothing is forgotten, and nothing is taken for mended.
    driver.broken = {"a": Run("a", "run-1")}

    async def replaced() -> bool:
        await looking.reconcile()
        return not driver.broken

    await until(replaced)

    assert early == []
    assert [each and each["code"] for each in attention] == ["CANNOT_REPLAY", "CANNOT_REPLAY", None]
    # The one that can be replayed again needs no attention any more.
    assert (await given.read_session(store, "b")).attention is None
    assert driver.signalled("a") == ["rebuild CANNOT_REPLAY"]
    assert driver.signalled("b") == driver.signalled("c") == []
    assert [each.message for each in caplog.records if each.levelno == logging.ERROR] == [
        "the workers cannot replay 2 sessions: were workflows changed without a patch? The APIs "
        "start them from the store after 0.05 seconds, unless workers that can replay them run by then"
    ]


async def test_one_that_cannot_be_started_stops_none_of_the_others(store: Store) -> None:
    driver = FakeDriver("a", "b", "c", "orphan")
    driver.broken = {each: Run(each, "run") for each in ("a", "b", "orphan")}
    driver.failures["a"] = RuntimeError("no")
    looking = Reconciler(store, driver, replay_patience=0.0)

    await looking.reconcile()

    assert driver.signalled("b") == ["rebuild CANNOT_REPLAY"]
    assert driver.broken.keys() == {"a", "orphan"}


async def test_a_turn_to_which_nothing_has_happened_has_more_time(store: Store) -> None:
    for session_id in ("a", "b"):
        await store.commit(Commit(session_id, change=SessionChange(status="running", turns=2)))
    driver = FakeDriver("a", "b", "c")
    driver.broken = {"a": Run("a", "run-1"), "b": Run("b/turn/1", "run-2"), "c": Run("c", "run-3")}
    now = [0.0]
    looking = Reconciler(store, driver, clock=lambda: now[0])

    await looking.reconcile()
    now[0] = 121
    await looking.reconcile()
    early = [each for each in ("a", "b", "c") if driver.signalled(each)]
    now[0] = 601
    await looking.reconcile()

    assert early == ["b", "c"]
    assert driver.signalled("a") == ["rebuild CANNOT_REPLAY"]


async def test_a_session_for_which_an_operator_has_to_decide_is_left_alone(store: Store) -> None:
    await store.set_attention("a", Attention(code="STORE_BEHIND", message="The store is older."))
    driver = FakeDriver("a", "b", "c")
    driver.broken = {"a": Run("a", "run-1")}

    await Reconciler(store, driver, replay_patience=0.0).reconcile()

    assert driver.calls == []
    attention = (await given.read_session(store, "a")).attention
    assert attention is not None
    assert attention["code"] == "STORE_BEHIND"
