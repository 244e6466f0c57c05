"""A session whose workflow no worker can replay: reported, and started from the store if that does not change."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from temporalio.client import WorkflowExecutionStatus

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import ModelCall, ModelOutcome, TurnRequest
from perdure.runtime.deploys.unserved import Run
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.reconciler import Reconciler
from perdure.session import decisions
from perdure.session.state import Rebuild, SessionState
from perdure.store.base import Store
from perdure.store.open import open_store
from tests.support import commands, given
from tests.support.waiting import until
from tests.support.workflows import Bench, Driven, Outside
from tests.workflows.test_session import held

NEXT_MOVE = decisions.next_move


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
def driver(bench: Bench) -> DriverClient:
    return DriverClient(bench.client, bench.settings.task_queue)


def waits_a_year(session: SessionState, now: float, *, renew: bool = False, bounded: bool = True) -> decisions.Move:
    """What a build decides whose drivers set a timer that those of this build do not set."""
    move = NEXT_MOVE(session, now, renew=renew, bounded=bounded)
    return decisions.Wait(now + 86400 * 365) if move == decisions.Wait() else move


async def known(store: Store, session: Driven) -> None:
    """Have the session in the store, too; it has had a turn."""
    await store.create_session(given.session(session.handle.id))
    await store.commit(given.ending(session_id=session.handle.id))


async def is_reported(driver: DriverClient, session: Driven) -> bool:
    return session.handle.id in (await driver.unreplayable() or {})


async def cannot_be_replayed(driver: DriverClient, session: Driven) -> None:
    await until(lambda: is_reported(driver, session), "Temporal to report the problem")


@pytest.fixture
async def broken(bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch) -> Driven:
    """A session whose driver has had a turn, and waits as those of another build do."""
    first = Outside()
    with monkeypatch.context() as other_build:
        other_build.setattr(decisions, "next_move", waits_a_year)
        async with bench.working(first):
            session = await bench.start(first)
            await session.deliver("dlv_0")
            await session.consumed("dlv_0")
            await session.idle()
    await known(store, session)
    return session


def rebuilds(session: Driven, *inbox: str, turn: int = 1) -> Outside:
    """An outside whose store says that the session is there."""
    outside = Outside()
    waiting = tuple(DeliveryRef(id=each, token_hash="now") for each in inbox)
    state = SessionState(session_id=session.handle.id, agent="demo", token_hash="now", turn=turn, inbox=waiting)
    outside.rebuilds = state.model_dump(mode="json")
    return outside


async def test_its_driver_is_started_from_the_store(
    bench: Bench, store: Store, driver: DriverClient, broken: Driven
) -> None:
    outside = rebuilds(broken)
    patient, hasty = Reconciler(store, driver), Reconciler(store, driver, replay_patience=0.0)
    async with bench.working(outside):
        await broken.deliver("dlv_1")
        await cannot_be_replayed(driver, broken)
        await patient.reconcile()
        waited = list(outside.rebuilt)
        attention = (await given.read_session(store, broken.handle.id)).attention
        await hasty.reconcile()
        await broken.deliver("dlv_1")
        await outside.until(lambda: outside.consumed == ["dlv_1"])
        # The sessions that run are left alone.
        await hasty.reconcile()

    assert waited == []
    assert attention is not None
    assert attention["code"] == "CANNOT_REPLAY"
    assert [each.reason for each in outside.rebuilt] == ["CANNOT_REPLAY"]


@pytest.mark.parametrize("order", ["--rebuild", "--fresh"])
async def test_an_operator_need_not_wait(
    bench: Bench, store: Store, driver: DriverClient, broken: Driven, tmp_path: Path, order: str
) -> None:
    environment = {
        "PERDURE_DATABASE_URL": f"sqlite:///{tmp_path / 'test.db'}",
        "PERDURE_TEMPORAL_ADDRESS": bench.client.service_client.config.target_host,
        "PERDURE_TASK_QUEUE": bench.settings.task_queue,
    }
    outside = rebuilds(broken)
    async with bench.working(outside):
        await broken.deliver("dlv_1")
        await cannot_be_replayed(driver, broken)
        said = [
            await asyncio.to_thread(commands.perdure, "sessions", *words, environment=environment)
            for words in (["reconcile"], ["repair", broken.handle.id, "--retry"], ["repair", broken.handle.id, order])
        ]
        await broken.deliver("dlv_1")
        await outside.until(lambda: outside.consumed == ["dlv_1"])

    assert [each.returncode for each in said] == [0, 0, 0]
    assert f"{broken.handle.id}  cannot be replayed by any worker" in said[0].stdout
    assert "--rebuild starts it from the store" in said[1].stdout
    assert [each.reason for each in outside.rebuilt] == ["OPERATOR"]


@pytest.mark.parametrize("how", ["repair", "cancel"])
async def test_an_order_that_its_driver_could_not_read_is_carried_out(
    bench: Bench, store: Store, driver: DriverClient, broken: Driven, how: str
) -> None:
    outside = rebuilds(broken)
    async with bench.working(outside):
        await broken.deliver("dlv_1")
        if how == "repair":
            await broken.handle.signal(names.REPAIR, {"how": "fail"})
        else:
            await broken.handle.cancel()
        await until(lambda: is_reported(driver, broken), "Temporal to report the problem")
        await Reconciler(store, driver, replay_patience=0.0).reconcile()
        await outside.until(lambda: bool(outside.closed))

    assert [each.failure.code for each in outside.closed] == [
        "SESSION_FAILED" if how == "repair" else "SESSION_CANCELLED"
    ]


async def test_a_turn_that_survived_its_driver_ends(
    bench: Bench, store: Store, driver: DriverClient, broken: Driven
) -> None:
    """An operator has reset the driver in Temporal: the turn is not its child any more."""
    turn = await bench.client.start_workflow("Other", id=names.turn_workflow(broken.handle.id, 1), task_queue="nobody")
    outside = rebuilds(broken, "dlv_1")
    run = Run(turn.id, turn.result_run_id or "")
    async with bench.working(outside):
        assert await driver.replace(broken.handle.id, run, Rebuild(reason="CANNOT_REPLAY"))
        await outside.until(lambda: outside.consumed == ["dlv_1"])
        again = await driver.replace(broken.handle.id, run, Rebuild(reason="CANNOT_REPLAY"))

    survivor = bench.client.get_workflow_handle(run.workflow_id, run_id=run.run_id)
    assert (await survivor.describe()).status == WorkflowExecutionStatus.TERMINATED
    assert not again


async def test_it_is_left_alone_when_a_build_that_can_replay_it_is_back(
    bench: Bench, store: Store, driver: DriverClient, broken: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.working(Outside()):
        await broken.deliver("dlv_1")
        await cannot_be_replayed(driver, broken)
        run = (await driver.unreplayable() or {})[broken.handle.id]

    back = Outside()
    monkeypatch.setattr(decisions, "next_move", waits_a_year)
    async with bench.working(back):
        await back.until(lambda: back.consumed == ["dlv_1"])
        while await is_reported(driver, broken):
            await asyncio.sleep(0.02)
        await Reconciler(store, driver, replay_patience=0.0).reconcile()
        described = await broken.handle.describe()

    assert described.run_id == run.run_id
    assert back.rebuilt == []


def always(request: TurnRequest) -> bool:
    del request
    return True


async def test_a_turn_that_cannot_be_replayed_begins_again(
    bench: Bench, store: Store, driver: DriverClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hangs(call: ModelCall) -> ModelOutcome:
        begun.set()
        return await held(call)

    first = Outside()
    first.answer = hangs
    with monkeypatch.context() as other_build:
        # The turns of the other build first process answers, also when there are none.
        other_build.setattr(decisions, "resumes", always)
        async with bench.working(first):
            session = await bench.start(first)
            await session.deliver("dlv_0")
            await begun.wait()
    await known(store, session)

    outside = rebuilds(session, "dlv_0", turn=0)
    async with bench.working(outside):
        # The call runs again, and nobody can read its outcome.
        await outside.until(lambda: outside.consumed == ["dlv_0"])
        await cannot_be_replayed(driver, session)
        await Reconciler(store, driver, replay_patience=0.0).reconcile()
        await outside.until(lambda: outside.consumed == ["dlv_0", "dlv_0"])

    assert [each.reason for each in outside.rebuilt] == ["CANNOT_REPLAY"]
