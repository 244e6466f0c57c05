"""Runs that kept a delivery of a kind that only a newer build reads, on such a build."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.protocol.deliveries import DeliveryRef
from perdure.session import state
from perdure.store.engine.rows import stamp
from tests.support.waiting import until
from tests.support.workflows import Bench, Driven, Outside
from tests.workflows.story import story
from tests.workflows.test_replay import a_history, a_replayer
from workflows.session import SessionWorkflow

HISTORIES = Path(__file__).parent / "histories"
KEPT = DeliveryRef(id="dlv_0", kind="?later", token_hash="", at=stamp(datetime.now(UTC)))


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(state.KINDS, "later", "kind-later")


async def until_it_waits(session: Driven) -> None:
    async def waits() -> bool:
        return "timer" in story(await session.handle.fetch_history())

    await until(waits, "the driver to wait")


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("name", ["unknown-kinds", "unknown-kinds-run-1", "began-with-an-unknown-kind"])
async def test_a_newer_build_replays_them(name: str) -> None:
    await a_replayer(SessionWorkflow).replay_workflow(a_history(HISTORIES / f"5-{name}.json"))


async def test_a_newer_build_takes_over_a_run_that_began_with_one(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.working(outside):
        session = await bench.start(outside, inbox=(KEPT,))
        await until_it_waits(session)

    monkeypatch.setitem(state.KINDS, "later", "kind-later")
    second = Outside()
    async with bench.working(second):
        await session.deliver("dlv_1")
        await second.until(lambda: second.consumed == ["dlv_1"])


async def test_a_newer_build_replays_a_run_that_was_rebuilt_with_one(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KEPT.model_copy(update={"kind": "later"})
    rebuilt = state.SessionState(session_id="s", agent="demo", token_hash="now", inbox=(kept,))
    outside.rebuilds = rebuilt.model_dump(mode="json")
    async with bench.working(outside):
        session = await bench.start(outside, rebuild=state.Rebuild(reason="LOST"))
        await until_it_waits(session)

    monkeypatch.setitem(state.KINDS, "later", "kind-later")
    await a_replayer(SessionWorkflow).replay_workflow(await session.handle.fetch_history())


async def test_a_newer_build_reads_a_delivery_of_a_later_version_that_an_older_one_has_kept(
    bench: Bench, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = DeliveryRef(id="dlv_0", token_hash="now", at=stamp(datetime.now(UTC)), version=2)
    async with bench.working(outside):
        session = await bench.start(outside)
        await session.idle()
        await session.handle.signal("deliver", later.model_dump(mode="json"))
        await until_it_waits(session)
        assert outside.consumed == []
        # It continues as new after a minute; this is the state with which it does so.
        view = await session.handle.query("describe")

    monkeypatch.setitem(state.REFERENCE_VERSIONS, 2, "delivery-2")
    # The run of the older build replays with the newer one, and the next run reads the delivery.
    await a_replayer(SessionWorkflow).replay_workflow(await session.handle.fetch_history())
    second = Outside()
    async with bench.working(second):
        renewed = await bench.start(second, {**view, "sessionId": session.handle.id})
        await second.until(lambda: second.consumed == ["dlv_0"])
        await renewed.handle.terminate()


async def test_only_so_many_are_kept(bench: Bench, outside: Outside) -> None:
    async with bench.working(outside):
        session = await bench.start(outside)
        for number in range(205):
            await session.deliver(f"later_{number}", kind="later", at=stamp(datetime.now(UTC)))
        await session.deliver("dlv_1")

        await session.consumed("dlv_1")
        view = await session.handle.query("describe")

    assert len(view["inbox"]) == 200
