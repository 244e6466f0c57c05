"""Sessions with accepted deliveries that were not signalled."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from perdure.errors import Unavailable
from perdure.protocol.wire import JsonObject
from perdure.runtime.signals import Signals
from perdure.runtime.sweeper import Sweeper
from perdure.session.view import DriverView
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, Consumption
from tests.runtime.fake_driver import FakeDriver
from tests.support import given
from tests.support.given import answer, answering, chooses, opening
from tests.support.waiting import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    yield store
    await store.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sweeper(store: Store, driver: FakeDriver, clock: Clock | None = None) -> Sweeper:
    # Less than nothing: what was accepted in this very moment is found too.
    return Sweeper(store, Signals(store, driver), older_than=-60, clock=clock or Clock())


async def begun(store: Store, *session_ids: str) -> None:
    """Sessions that have had a turn and wait for the next delivery."""
    for session_id in session_ids:
        await store.create_session(given.session(session_id))
        await store.commit(given.ending(session_id=session_id))


async def stranded(store: Store, *session_ids: str, names: tuple[str, ...] = ("d",)) -> None:
    """Deliveries that were accepted by an API that died before the signal."""
    await begun(store, *session_ids)
    for session_id in session_ids:
        for name in names:
            await store.accept(given.delivery(f"{session_id}/{name}", session_id=session_id))


async def test_an_unread_delivery_and_an_unread_answer_are_signalled_again_in_order(store: Store) -> None:
    await stranded(store, "s")
    await store.commit(opening("r"))
    await answer(store, answering(("r", chooses("approve"))))
    await store.accept(given.delivery("last"))
    driver = FakeDriver("s")

    await sweeper(store, driver).sweep()

    assert driver.signalled() == ["deliver s/d", "deliver a", "deliver last"]


async def test_consumed_and_refused_deliveries_and_those_of_an_ended_session_are_left_alone(store: Store) -> None:
    await stranded(store, "s", "t", "u")
    await store.commit(Commit("s", consume=Consumption(1, ["s/d"])))
    await given.refuse(store, "t/d", "t")
    await store.commit(given.closing("u"))
    driver = FakeDriver("s", "t", "u")

    await sweeper(store, driver).sweep()

    assert driver.tried == []


async def test_a_young_delivery_is_left_to_the_process_that_accepted_it(store: Store) -> None:
    await stranded(store, "s")
    driver = FakeDriver("s")

    await Sweeper(store, Signals(store, driver), older_than=60).sweep()

    assert driver.tried == []


async def test_each_session_is_signalled_in_its_order_whatever_happens_to_the_others(store: Store) -> None:
    names = tuple(f"{n:02}" for n in range(9, -1, -1))
    sessions = [f"s{n}" for n in range(20)]
    await stranded(store, *sessions, names=names)

    class Slow(FakeDriver):
        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            # Those of the others come in between.
            for _ in range(int(session_id[1:]) % 4):
                await asyncio.sleep(0)
            await super().deliver(session_id, ref)

    driver = Slow(*sessions)

    await sweeper(store, driver).sweep()

    for session_id in sessions:
        assert driver.signalled(session_id) == [f"deliver {session_id}/{name}" for name in names]


async def test_a_session_without_a_delivery_is_started_once_and_then_left_alone(store: Store) -> None:
    await store.create_session(given.session())
    driver, clock = FakeDriver(), Clock()
    swept = sweeper(store, driver, clock)

    for _ in range(3):
        await swept.sweep()
        clock.now += 10_000

    assert driver.signalled() == ["start"]
    assert driver.tried == ["s", "s"]
    row = await given.read_session(store)
    assert (row.status, await store.unsignalled(older_than=-60, after="", limit=10)) == ("waiting", [])


async def test_a_session_whose_first_message_was_withdrawn_is_left_alone_too(store: Store) -> None:
    await store.create_session(given.session(), given.delivery())
    await store.cancel("s", None, given.cancelling)
    await given.refuse(store, "d", "s")

    await sweeper(store, FakeDriver()).sweep()

    row = await given.read_session(store)
    assert (row.status, row.cancel_turn) == ("waiting", None)


async def test_a_session_that_never_started_is_started_with_its_first_delivery(store: Store) -> None:
    await store.create_session(given.session(), given.delivery())
    driver = FakeDriver()

    await sweeper(store, driver).sweep()

    assert [ref.id for ref in driver.started["s"].inbox] == ["d"]
    assert driver.signalled()[0] == "start"


async def test_a_cancel_request_is_signalled_again(store: Store) -> None:
    await begun(store, "s")
    await store.commit(given.running(1))
    await given.cancel(store)
    driver = FakeDriver("s")

    await sweeper(store, driver).sweep()

    assert driver.signalled() == ["cancel turn_1"]


async def test_a_session_without_a_workflow_is_started_from_the_store(store: Store) -> None:
    await stranded(store, "s")
    driver = FakeDriver()

    await sweeper(store, driver).sweep()

    assert driver.signalled() == ["rebuild WORKFLOW_LOST"]


async def sweep_for(sweeping: Sweeper, clock: Clock, seconds: int) -> None:
    for _ in range(0, seconds, 5):
        clock.now += 5
        await sweeping.sweep()


async def test_a_delivery_that_the_driver_holds_is_signalled_once_however_long_it_waits(store: Store) -> None:
    await stranded(store, "s", names=("b", "a"))
    driver, clock = FakeDriver("s"), Clock()

    await sweep_for(sweeper(store, driver, clock), clock, 3600)

    assert driver.signalled() == ["deliver s/b", "deliver s/a"]
    # It is asked less and less often.
    assert 8 <= len(driver.asked) <= 12


async def test_a_delivery_that_another_process_signalled_is_not_signalled_again(store: Store) -> None:
    await stranded(store, "s", names=("b", "a"))
    driver, clock = FakeDriver("s"), Clock()
    driver.inboxes["s"] = ["s/b"]

    await sweep_for(sweeper(store, driver, clock), clock, 60)

    assert driver.signalled() == ["deliver s/a"]


async def test_a_delivery_that_the_driver_has_lost_is_signalled_again(store: Store) -> None:
    await stranded(store, "s", names=("b", "a"))
    driver, clock = FakeDriver("s"), Clock()
    sweeping = sweeper(store, driver, clock)
    await sweeping.sweep()
    # Temporal was restored from a copy, say.
    driver.inboxes["s"] = ["s/b"]

    await sweep_for(sweeping, clock, 60)

    assert driver.signalled() == ["deliver s/b", "deliver s/a", "deliver s/a"]


async def test_a_cancel_request_that_a_driver_could_not_read_reaches_it_soon_after_it_can(store: Store) -> None:
    await stranded(store, "s")
    await store.cancel("s", None, lambda turn: given.event(f"stop {turn}"))
    driver, clock = FakeDriver("s"), Clock()
    sweeping = sweeper(store, driver, clock)

    await sweep_for(sweeping, clock, 3600)
    before = len(driver.signalled())
    await sweep_for(sweeping, clock, 60)

    assert "cancel turn_1" in driver.signalled()[before:]


async def test_a_store_that_is_older_than_its_driver_is_reported(store: Store) -> None:
    await stranded(store, "s")
    driver, clock = FakeDriver("s"), Clock()
    driver.said["s"] = {"idle": True, "seen": ["s/d"], "turn": 9, "head": 99}

    await sweep_for(sweeper(store, driver, clock), clock, 60)

    row = await given.read_session(store, "s")
    assert row.attention is not None
    assert row.attention["code"] == "STORE_BEHIND"
    # What follows is for an operator to decide.
    assert not [call for call in driver.signalled() if call.startswith("rebuild")]


@pytest.mark.parametrize(
    "said", [{"turn": 1, "seen": ["s/d"]}, {"turn": 0}], ids=["it has done with a delivery", "it has missed a turn"]
)
async def test_a_driver_that_is_older_than_its_store_reads_the_store_again(store: Store, said: JsonObject) -> None:
    await stranded(store, "s")
    driver = FakeDriver("s")
    driver.said["s"] = {"idle": True, **said}

    await sweeper(store, driver).sweep()

    assert driver.signalled()[0] == "rebuild DRIVER_BEHIND"


@pytest.mark.parametrize(
    "said",
    [
        {"turn": 1},
        # A signal that it has not processed yet, and a turn that runs.
        {"turn": 0, "idle": False, "seen": ["s/d"]},
        {"turn": 1, "seen": ["s/d"], "inbox": [{"id": "s/d"}]},
        # A turn that waits for a worker has begun, and has not ended.
        {"turn": 0, "held": {"deliveries": [{"id": "s/d"}]}, "seen": ["s/d"]},
        # A build of old does not say whether it works.
        {"turn": 0, "idle": None},
    ],
)
async def test_a_driver_that_works_or_waits_is_left_alone(store: Store, said: JsonObject) -> None:
    await stranded(store, "s")
    driver = FakeDriver("s")
    driver.said["s"] = {key: value for key, value in {"idle": True, **said}.items() if value is not None}

    await sweeper(store, driver).sweep()

    assert [call for call in driver.signalled() if call.startswith("rebuild")] == []
    assert (await given.read_session(store, "s")).attention is None


async def test_without_workers_a_signalled_delivery_counts_as_held(store: Store) -> None:
    await stranded(store, "s", names=("b", "a"))
    driver, clock = FakeDriver("s"), Clock()
    driver.no_workers = True
    sweeping = sweeper(store, driver, clock)

    await sweep_for(sweeping, clock, 3600)
    await store.accept(given.delivery("c"))
    await sweep_for(sweeping, clock, 60)

    assert driver.signalled() == ["deliver s/b", "deliver s/a", "deliver c"]


async def test_while_no_driver_answers_few_are_queried_and_all_are_signalled(store: Store) -> None:
    sessions = [f"s{n:02}" for n in range(40)]
    await stranded(store, *sessions)
    driver = FakeDriver(*sessions)
    driver.no_workers = True

    await sweeper(store, driver).sweep()

    assert sorted(call.session_id for call in driver.calls) == sessions
    # Each question may take seconds.
    assert len(driver.asked) == 8


async def test_few_drivers_that_do_not_answer_are_waited_for_even_if_others_answer_in_between(store: Store) -> None:
    class Mixed(FakeDriver):
        async def describe(self, session_id: str) -> DriverView | None:
            # Every second session is driven by a build that has no worker.
            view = await super().describe(session_id)
            return view if int(session_id[1:]) % 2 else None

    sessions = [f"s{n:02}" for n in range(80)]
    await stranded(store, *sessions)
    driver = Mixed(*sessions)

    await sweeper(store, driver).sweep()

    assert sorted(call.session_id for call in driver.calls) == sessions
    assert len([each for each in driver.asked if int(each[1:]) % 2 == 0]) == 8


async def test_what_was_signalled_before_a_failure_is_not_signalled_again(store: Store) -> None:
    class Full(FakeDriver):
        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            if ref["id"] == "s/b":
                raise ValueError("too much has been sent to it")
            await super().deliver(session_id, ref)

    await stranded(store, "s", names=("c", "b", "a"))
    await store.mark_unsignalled("s")
    driver, clock = Full("s"), Clock()

    await sweep_for(sweeper(store, driver, clock), clock, 60)

    assert driver.signalled() == ["deliver s/c"]


async def test_each_session_has_pauses_of_its_own(store: Store) -> None:
    await stranded(store, "old")
    driver, clock = FakeDriver("old", "new"), Clock()
    sweeping = sweeper(store, driver, clock)
    await sweep_for(sweeping, clock, 300)
    before = driver.asked.count("old")
    await stranded(store, "new")

    await sweeping.sweep()

    assert driver.signalled("new") == ["deliver new/d"]
    assert driver.asked.count("old") == before


async def test_a_lost_session_that_no_worker_would_take_up_waits(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await stranded(store, "lost", "there")
    driver = FakeDriver("there")
    driver.no_workers = True
    sweeping = sweeper(store, driver)
    with caplog.at_level(logging.ERROR):
        await sweeping.sweep()
    assert (driver.rebuilt, driver.signalled("there"), caplog.text) == ({}, ["deliver there/d"], "")

    driver.no_workers = False
    await sweeping.sweep()

    assert set(driver.rebuilt) == {"lost"}


async def test_many_lost_sessions_that_no_worker_would_take_up_stop_none_of_the_others(store: Store) -> None:
    lost = [f"lost{n:02}" for n in range(40)]
    await stranded(store, *lost, "there")
    driver = FakeDriver("there")
    driver.no_workers = True

    await sweeper(store, driver).sweep()

    assert driver.signalled("there") == ["deliver there/d"]


async def test_a_session_that_consumed_a_delivery_in_between_starts_again(store: Store) -> None:
    await stranded(store, "s")
    driver, clock = FakeDriver("s"), Clock()
    sweeping = sweeper(store, driver, clock)
    await sweep_for(sweeping, clock, 300)
    await store.commit(Commit("s", consume=Consumption(1, ["s/d"])))
    await sweeping.sweep()
    await store.accept(given.delivery("e"))

    await sweeping.sweep()

    assert driver.signalled()[-1] == "deliver e"


async def test_a_session_that_fails_stops_none_of_the_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    sessions = [f"s{n:02}" for n in range(30)]
    await stranded(store, *sessions)
    driver = FakeDriver(*sessions)
    # More than may fail one after another.
    broken = sessions[:10]
    driver.failures = {each: ValueError("a fault of ours") for each in broken}

    with caplog.at_level(logging.ERROR):
        await sweeper(store, driver).sweep()

    assert {call.session_id for call in driver.calls} == set(sessions) - set(broken)
    assert "session s00 could not be signalled" in caplog.text


async def test_a_few_sessions_that_cannot_be_reached_stop_none_of_the_others(store: Store) -> None:
    sessions = [f"s{n:02}" for n in range(30)]
    await stranded(store, *sessions)
    driver = FakeDriver(*sessions)
    driver.failures = {each: Unavailable() for each in sessions[:6]}
    sweeping = sweeper(store, driver)

    await sweeping.sweep()
    assert {call.session_id for call in driver.calls} == set(sessions[6:])

    driver.failures = {}
    await sweeping.sweep()
    assert {call.session_id for call in driver.calls} == set(sessions)


async def test_while_temporal_is_away_a_sweep_ends_early_and_the_first_one_after_it_signals_all(store: Store) -> None:
    sessions = [f"s{n:03}" for n in range(250)]
    await stranded(store, *sessions)
    driver = FakeDriver(*sessions)
    driver.away = True
    sweeping = sweeper(store, driver)

    for _ in range(3):
        driver.tried.clear()
        await sweeping.sweep()
        assert 0 < len(driver.tried) <= 24

    driver.away = False
    await sweeping.sweep()
    assert [call.session_id for call in driver.calls].count("s000") == 1
    assert {call.session_id for call in driver.calls} == set(sessions)


async def test_a_temporal_that_leaves_in_the_middle_loses_nothing(store: Store) -> None:
    class Leaving(FakeDriver):
        left = 20

        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            await super().deliver(session_id, ref)
            self.left -= 1
            self.away = self.left <= 0

    sessions = [f"s{n:02}" for n in range(40)]
    await stranded(store, *sessions, names=("b", "a"))
    driver = Leaving(*sessions)
    sweeping = sweeper(store, driver)
    await sweeping.sweep()
    assert driver.away

    driver.left = 1000
    driver.away = False
    await sweeping.sweep()

    for session_id in sessions:
        signalled = driver.signalled(session_id)
        assert signalled[-2:] == [f"deliver {session_id}/b", f"deliver {session_id}/a"]


async def test_a_session_on_a_later_page_is_signalled_too(store: Store) -> None:
    sessions = [f"s{n:03}" for n in range(410)]
    await stranded(store, *sessions)
    driver = FakeDriver(*sessions)

    await sweeper(store, driver).sweep()

    assert sorted(call.session_id for call in driver.calls) == sessions


@pytest.mark.parametrize(
    ("error", "level", "said"),
    [
        (ValueError("a fault of ours"), logging.ERROR, "the sweep failed"),
        (Unavailable(), logging.WARNING, "cannot be searched"),
    ],
    ids=["a fault", "a store that is away"],
)
async def test_a_sweep_that_fails_is_not_the_last_one(
    store: Store,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    level: int,
    said: str,
) -> None:
    async def fails(**_: object) -> list[str]:
        raise error

    await stranded(store, "s")
    driver = FakeDriver("s")
    sweeping = Sweeper(store, Signals(store, driver), every=0.01, older_than=-60)
    monkeypatch.setattr(store, "unsignalled", fails)

    async with sweeping.running():
        with caplog.at_level(level):
            await until(lambda: said in caplog.text)
        monkeypatch.undo()
        await until(lambda: "deliver s/d" in driver.signalled())
