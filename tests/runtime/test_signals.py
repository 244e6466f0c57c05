"""Deliveries that the store has accepted are signalled to Temporal, and wait while Temporal cannot be reached."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus

from perdure.agents import Agent, Limits
from perdure.agents.registry import AgentRegistry, bounds_of
from perdure.errors import Unavailable
from perdure.protocol.deliveries import Bounds
from perdure.protocol.wire import JsonObject
from perdure.runtime.drivers.lost import start_lost_driver
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, DeliveryRow
from perdure.store.lifecycle import NewFork
from tests.runtime.fake_driver import FakeDriver
from tests.support import given


async def accepted(store: Store, *delivery_ids: str) -> list[DeliveryRow]:
    return [(await store.accept(given.delivery(each))).delivery for each in delivery_ids]


async def unsignalled(store: Store, session_id: str = "s") -> bool:
    return (await given.read_session(store, session_id)).unsignalled > 0


# --- deliver ------------------------------------------------------------------------------------------------


async def test_a_delivery_is_signalled_as_it_was_accepted(store: Store, driver: FakeDriver, signals: Signals) -> None:
    (row,) = await accepted(store, "d")

    assert await signals.deliver(row, unsignalled=False)

    assert driver.signalled() == ["deliver d"]


async def test_what_temporal_does_not_know_of_comes_first(store: Store, driver: FakeDriver, signals: Signals) -> None:
    *_, last = await accepted(store, "c", "b", "a")
    await store.mark_unsignalled("s")

    assert await signals.deliver(last, unsignalled=True)

    assert driver.signalled() == ["deliver c", "deliver b", "deliver a"]
    assert not await unsignalled(store)


async def test_a_delivery_that_cannot_be_signalled_waits_and_the_session_is_marked(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    (row,) = await accepted(store, "d")
    driver.away = True

    assert not await signals.deliver(row, unsignalled=False)
    assert not await signals.deliver(row, unsignalled=True)

    assert await unsignalled(store)
    assert [each.delivery_id for each in await store.unread("s")] == [row.delivery_id]


async def test_after_an_outage_all_is_signalled_in_the_order_it_was_accepted(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    driver.away = True
    for name in ("z", "y"):
        accepting = await store.accept(given.delivery(name))
        assert not await signals.deliver(accepting.delivery, unsignalled=accepting.unsignalled)
    driver.away = False

    accepting = await store.accept(given.delivery("x"))
    assert await signals.deliver(accepting.delivery, unsignalled=accepting.unsignalled)

    assert driver.signalled() == ["deliver z", "deliver y", "deliver x"]


async def test_a_request_that_is_repeated_after_an_absence_overtakes_nothing(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    driver.away = True
    for name in ("z", "y"):
        accepting = await store.accept(given.delivery(name, key=name))
        await signals.deliver(accepting.delivery, unsignalled=accepting.unsignalled)
    driver.away = False

    again = await store.accept(given.delivery("x", key="y"))
    await signals.deliver(again.delivery, unsignalled=again.unsignalled)

    assert driver.signalled() == ["deliver z", "deliver y"]


async def test_a_store_that_cannot_be_marked_is_no_failure_of_the_delivery(
    store: Store, driver: FakeDriver, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(session_id: str, unsignalled: bool) -> None:
        raise Unavailable

    (row,) = await accepted(store, "d")
    driver.away = True
    monkeypatch.setattr(store, "mark_unsignalled", away)

    assert not await signals.deliver(row, unsignalled=False)


async def test_a_delivery_to_an_ended_session_is_not_signalled(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    (row,) = await accepted(store, "d")
    await store.commit(given.closing())
    driver.workflows["s"] = WorkflowExecutionStatus.COMPLETED

    assert await signals.deliver(row, unsignalled=False)

    assert driver.signalled() == []
    assert driver.rebuilt == {}


async def test_a_delivery_without_a_driver_starts_one_from_the_store(store: Store, signals: Signals) -> None:
    (row,) = await accepted(store, "d")
    driver = FakeDriver()
    signals = Signals(store, driver)

    assert await signals.deliver(row, unsignalled=False)

    # It reads what waits from the store by itself.
    assert driver.signalled() == ["rebuild WORKFLOW_LOST"]


# --- start --------------------------------------------------------------------------------------------------


async def test_a_new_session_is_started_with_its_first_delivery(store: Store) -> None:
    agents = AgentRegistry([Agent(name="echo", model="test:fast", turns="inline")])
    driver = FakeDriver()
    new = replace(given.session("t"), title="Hello there", mode="task")

    assert await Signals(store, driver, agents).start(new, {"id": "d", "tokenHash": "token of t"})

    state = driver.started["t"]
    assert (state.session_id, state.agent, state.model, state.mode) == ("t", "echo", "test:fast", "task")
    assert state.turns == "inline"
    assert (state.token_hash, [ref.id for ref in state.inbox]) == ("token of t", ["d"])
    assert driver.summaries["t"] == "echo: Hello there"


async def test_a_summary_has_no_content_of_messages_when_that_is_configured(store: Store) -> None:
    driver = FakeDriver()

    await Signals(store, driver, ui_detail=False).start(
        replace(given.session("t"), title="Secret"), {"id": "d", "tokenHash": ""}
    )

    assert driver.summaries["t"] == "echo"


async def test_a_session_that_cannot_be_started_waits(store: Store, driver: FakeDriver, signals: Signals) -> None:
    await store.create_session(given.session("t"), given.delivery(session_id="t"))
    driver.away = True

    assert not await signals.start(given.session("t"), {"id": "d", "tokenHash": ""})

    assert await unsignalled(store, "t")


async def test_a_delivery_that_a_newer_build_accepted_is_signalled_unchanged(store: Store, driver: FakeDriver) -> None:
    class Exact(FakeDriver):
        refs: list[JsonObject]

        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            await super().deliver(session_id, ref)
            self.refs = [*getattr(self, "refs", []), ref]

    ref: JsonObject = {"id": "d", "kind": "telepathy", "tokenHash": "h", "wave": {"length": 7}}
    driver = Exact("s")
    signals = Signals(store, driver)
    row = (await store.accept(given.delivery(ref=ref))).delivery

    assert await signals.deliver(row, unsignalled=False)
    assert await signals.deliver(row, unsignalled=True)

    assert driver.refs == [{**ref, "at": row.accepted_at}] * 2


async def test_a_session_starts_also_when_a_newer_build_has_accepted_what_waits(store: Store) -> None:
    ref: JsonObject = {"id": "b", "kind": "telepathy", "tokenHash": "h"}
    await store.create_session(given.session("t"), given.delivery("a", session_id="t"))
    await store.accept(given.delivery("b", session_id="t", ref=ref))
    driver = FakeDriver()

    await Signals(store, driver).signal_all("t")

    assert [each.id for each in driver.started["t"].inbox] == ["a", "b"]
    assert driver.signalled("t") == ["start", "deliver a", "deliver b"]


# --- cancel -------------------------------------------------------------------------------------------------


async def test_a_cancel_request_is_signalled(driver: FakeDriver, signals: Signals) -> None:
    assert await signals.cancel(CancelRequest("s", 3))

    assert driver.signalled() == ["cancel turn_3"]


async def test_a_cancel_request_that_cannot_be_signalled_waits(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    await store.commit(given.running(1))
    requested = await given.cancel(store)
    assert requested is not None
    driver.away = True
    assert not await signals.cancel(requested)
    assert await unsignalled(store)
    driver.away = False

    await signals.signal_all("s")

    assert driver.signalled() == ["cancel turn_1"]


async def test_a_cancel_request_without_a_driver_starts_one_from_the_store(store: Store) -> None:
    await store.commit(given.running(1))
    requested = await given.cancel(store)
    assert requested is not None
    driver = FakeDriver()

    assert await Signals(store, driver).cancel(requested)

    # It reads the cancel request from the store by itself.
    assert driver.signalled() == ["rebuild WORKFLOW_LOST"]


# --- catch up -----------------------------------------------------------------------------------------------


async def test_deliveries_come_before_the_cancel_request(store: Store, driver: FakeDriver, signals: Signals) -> None:
    await accepted(store, "b", "a")
    await given.cancel(store)
    await store.mark_unsignalled("s")

    await signals.signal_all("s")

    assert driver.signalled() == ["deliver b", "deliver a", "cancel turn_1"]
    assert not await unsignalled(store)


async def test_a_session_that_was_never_started_is_started_with_all_that_waits(store: Store) -> None:
    ref: JsonObject = {"id": "b", "kind": "message", "tokenHash": "token of t", "traceparent": "00-1-2-3"}
    await store.create_session(replace(given.session("t"), title="Hello"), given.delivery("b", session_id="t", ref=ref))
    await store.accept(given.delivery("a", session_id="t"))
    await store.mark_unsignalled("t")
    driver = FakeDriver()

    await Signals(store, driver).signal_all("t")

    state = driver.started["t"]
    assert [each.id for each in state.inbox] == ["b", "a"]
    assert state.inbox[0].traceparent == "00-1-2-3"
    assert (state.agent, state.token_hash) == ("echo", "token of t")
    assert driver.summaries["t"] == "echo: Hello"
    assert driver.signalled("t")[0] == "start"
    assert not await unsignalled(store, "t")


async def test_a_cancel_request_of_a_new_session_is_signalled_once_its_driver_is_started(store: Store) -> None:
    await store.create_session(given.session("t"), given.delivery(session_id="t"))
    await given.cancel(store, "t")
    driver = FakeDriver()

    await Signals(store, driver).signal_all("t")

    assert driver.signalled("t") == ["start", "deliver d", "cancel turn_0"]


async def test_a_new_session_that_runs_already_is_not_started_twice(store: Store) -> None:
    await store.create_session(given.session("t"), given.delivery(session_id="t"))
    driver = FakeDriver("t")

    await Signals(store, driver).signal_all("t")

    assert driver.signalled("t") == ["deliver d"]


async def test_an_absence_in_the_middle_leaves_the_session_marked(store: Store, signals: Signals) -> None:
    class Leaving(FakeDriver):
        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            await super().deliver(session_id, ref)
            self.away = True

    await accepted(store, "b", "a")
    await store.mark_unsignalled("s")
    driver = Leaving("s")
    signals = Signals(store, driver)

    with pytest.raises(Unavailable):
        await signals.signal_all("s")

    assert await unsignalled(store)
    assert driver.signalled() == ["deliver b"]


async def test_a_mark_that_was_set_again_since_stays(store: Store) -> None:
    class Meeting(FakeDriver):
        """While the first delivery is signalled, another one is accepted and finds Temporal away."""

        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            await super().deliver(session_id, ref)
            if ref["id"] == "z":
                self.away = True
                accepted = await store.accept(given.delivery("y"))
                assert not await signals.deliver(accepted.delivery, unsignalled=accepted.unsignalled)
                self.away = False

    driver = Meeting("s")
    signals = Signals(store, driver)
    await accepted(store, "z")
    await store.mark_unsignalled("s")

    await signals.signal_all("s")

    # Else the next one overtakes the one that was not signalled.
    assert await unsignalled(store)


async def test_nothing_overtakes_a_signal_that_is_being_sent(store: Store) -> None:
    class Meeting(FakeDriver):
        """While the first delivery is on its way, another one is accepted."""

        met = False

        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            if not self.met:
                self.met = True
                its = {"id": "y", "kind": "message", "tokenHash": "token of s"}
                accepted = await store.accept(given.delivery("y", ref=its))
                assert await signals.deliver(accepted.delivery, unsignalled=accepted.unsignalled)
            await super().deliver(session_id, ref)

    driver = Meeting("s")
    signals = Signals(store, driver)
    await accepted(store, "z")
    await store.mark_unsignalled("s")

    await signals.signal_all("s")

    assert driver.signalled()[:2] == ["deliver z", "deliver y"]
    assert not await unsignalled(store)


async def test_nothing_overtakes_what_temporal_takes_long_to_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stalling(FakeDriver):
        """The first signal does not come through."""

        stalled = asyncio.Event()

        async def deliver(self, session_id: str, ref: JsonObject) -> None:
            if not self.stalled.is_set():
                self.stalled.set()
                await asyncio.Event().wait()
            await super().deliver(session_id, ref)

    monkeypatch.setattr("perdure.runtime.signals._SLOW_SECONDS", 0.0)
    driver = Stalling("s")
    signals = Signals(store, driver)
    first, second = await accepted(store, "z", "y")
    stalling = asyncio.create_task(signals.deliver(first, unsignalled=False))
    await driver.stalled.wait()

    assert await signals.deliver(second, unsignalled=False)

    assert driver.signalled() == ["deliver z", "deliver y"]
    stalling.cancel()


async def test_an_ended_session_does_not_stay_marked(store: Store, signals: Signals) -> None:
    """Its start was not answered in time, but went through; then it ended before the process that waited marked it."""
    await store.commit(given.closing())
    await store.mark_unsignalled("s")

    await signals.signal_all("s")

    assert await store.unsignalled(older_than=-60, after="", limit=10) == []


@pytest.mark.parametrize("session_id", ["unknown", "over"])
async def test_an_ended_or_unknown_session_is_not_signalled(
    store: Store, driver: FakeDriver, signals: Signals, session_id: str
) -> None:
    await store.create_session(given.session("over"), given.delivery(session_id="over"))
    await store.commit(given.closing("over"))

    await signals.signal_all(session_id)

    assert driver.tried == []


async def test_a_lost_session_that_no_worker_would_take_up_stays_marked(store: Store) -> None:
    (row,) = await accepted(store, "d")
    driver = FakeDriver()
    driver.no_workers = True
    signals = Signals(store, driver)

    assert not await signals.deliver(row, unsignalled=False)
    assert not await signals.deliver(row, unsignalled=True)

    assert driver.rebuilt == {}
    assert await unsignalled(store)


# --- restore ------------------------------------------------------------------------------------------------


async def test_a_fork_whose_workflow_was_not_started_is_started_like_a_new_session(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    await store.fork(NewFork("f", "token of f", "s", 0))
    fork = await given.read_session(store, "f")
    driver.away = True
    assert not await signals.start_with_turns(fork)
    driver.away = False

    await signals.signal_all("f")

    state = driver.started["f"]
    assert (state.turn, state.next_reader_turn, state.head, state.token_hash) == (1, 1, 1, "token of f")
    assert (await given.read_session(store, "f")).unsignalled == 0


async def test_a_fork_without_a_workflow_is_found(store: Store, driver: FakeDriver) -> None:
    await store.fork(NewFork("f", "token of f", "s", 0))

    await start_lost_driver(store, driver, await given.read_session(store, "f"))

    assert driver.rebuilt["f"].reason == "FORKED"


# --- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "asked", "bounds"),
    [
        ({}, {}, None),
        ({}, {"idle_seconds": 9.0}, Bounds(idle_seconds=9)),
        ({"idle_seconds": 5}, {"idle_seconds": 9.0}, Bounds(idle_seconds=5)),
        ({"idle_seconds": 5}, {"idle_seconds": 2.0}, Bounds(idle_seconds=2)),
        ({"session_seconds": 60}, {"deadline": 3.0}, Bounds(deadline=3)),
        ({"max_attempts": 10}, {}, None),
        ({"max_attempts": 3}, {}, Bounds(attempts=3)),
        ({"max_attempts": None, "turn_seconds": 60}, {}, Bounds(attempts=0, turn_seconds=60)),
    ],
)
def test_the_tighter_bound_counts(limits: dict[str, Any], asked: dict[str, Any], bounds: Bounds | None) -> None:
    assert bounds_of(Limits(**limits), **asked) == bounds


async def test_a_session_that_is_started_later_has_its_bounds(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    bounds = Bounds(deadline=5, idle_seconds=60)
    new = replace(given.session("bounded"), bounds=bounds)
    await store.create_session(new, given.delivery(session_id="bounded"))

    await signals.signal_all("bounded")

    assert driver.started["bounded"].bounds == bounds


async def test_a_cancel_that_is_signalled_again_does_not_mean_what_came_after_it(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    await store.commit(given.ending(0))
    (row,) = await accepted(store, "d")
    await given.cancel(store)
    await accepted(store, "later")

    await signals.signal_all("s")

    assert driver.cancels_until == [row.accepted_at]
