"""A caller cancels the turn that runs, waits or comes next."""

import asyncio
import time

import pytest
from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome
from tests.support.processes import PATIENCE
from tests.support.workflows import Bench, Outside, wait_beating

from .story import story
from .test_session import asks, held

pytestmark = pytest.mark.usefixtures("working")


async def test_a_running_turn_is_cancelled_and_the_next_message_works(bench: Bench, outside: Outside) -> None:
    begun = asyncio.Event()

    async def held_second(call: ModelCall) -> ModelOutcome:
        if call.at.turn != 1:
            return Finished()
        begun.set()
        return await held(call)

    outside.answer = held_second
    session = await bench.start(outside)
    sent = time.monotonic()
    await session.deliver("dlv_0")
    await session.consumed("dlv_0")
    undisturbed = time.monotonic() - sent
    await session.deliver("dlv_1")
    await begun.wait()

    asked = time.monotonic()
    await session.handle.signal(names.CANCEL, {})
    await session.handle.signal(names.CANCEL, {})
    await outside.until(lambda: bool(outside.concluded))
    took = time.monotonic() - asked

    await session.deliver("dlv_2")
    await session.consumed("dlv_0", "dlv_2")
    # It reaches the activity with its next heartbeat; the rest is as much work as a turn or two.
    assert took < 2 + 2 * undisturbed
    assert [made.kind for made in outside.concluded] == ["cancelled"]


async def test_cancelling_an_idle_session_does_nothing(bench: Bench, outside: Outside) -> None:
    session = await bench.start(outside)

    await session.handle.signal(names.CANCEL, {})
    await session.deliver("dlv_1")

    await session.consumed("dlv_1")
    assert outside.concluded == []


async def test_cancelling_a_parked_turn_withdraws_what_it_asked(bench: Bench, outside: Outside) -> None:
    outside.answer = asks(expires=3600)
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await session.parked()

    await session.handle.signal(names.CANCEL, {})
    await session.deliver("dlv_2")

    await session.consumed("dlv_1", "dlv_2")
    assert [[each.request_id for each in made.open] for made in outside.withdrawals] == [["inp_1"]]


async def test_a_cancel_of_the_turn_after_a_parked_one_withdraws_nothing(bench: Bench, outside: Outside) -> None:
    """It was accepted after the answer that begins this turn, and has overtaken it on its way to the driver."""
    outside.answer = asks(expires=3600)
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await session.parked()

    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await session.deliver("dlv_2", kind="answer")

    await session.consumed("dlv_1", "dlv_2")
    assert outside.withdrawals == []


async def test_a_cancel_sent_before_the_turn_began_is_honoured(bench: Bench, outside: Outside) -> None:
    away = Bench(bench.client)
    outside.answer = held
    session = await away.start(outside)
    await session.deliver("dlv_1")
    await session.handle.signal(names.CANCEL, {})

    async with away.working(outside):
        await outside.until(lambda: bool(outside.concluded))

    assert [made.kind for made in outside.concluded] == ["cancelled"]
    assert [delivery.id for delivery in outside.concluded[0].deliveries] == ["dlv_1"]


async def test_a_cancel_that_comes_too_late_leaves_the_next_turn_alone(bench: Bench, outside: Outside) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def holds_the_second(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 1:
            begun.set()
            await wait_beating(gate)
        return Finished()

    outside.answer = holds_the_second
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await session.deliver("dlv_2")
    await begun.wait()

    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.handle.query(names.DESCRIBE)
    gate.set()

    await session.consumed("dlv_1", "dlv_2")
    assert outside.concluded == []


async def test_a_cancel_of_what_a_later_message_has_replaced_leaves_the_turn_of_that_alone(
    bench: Bench, outside: Outside
) -> None:
    """It was accepted when `dlv_1` was to begin this turn, and comes when that is superseded."""
    begun, gate = asyncio.Event(), asyncio.Event()

    async def holds(_: ModelCall) -> ModelOutcome:
        begun.set()
        await wait_beating(gate)
        return Finished()

    outside.answer = holds
    session = await bench.start(outside)
    before, now = "2026-11-20T12:01:00.000000Z", "2026-11-20T12:02:00.000000Z"
    await session.deliver("dlv_2", at=now, mode="interrupt", supersedes=now)
    await begun.wait()

    await session.handle.signal(names.CANCEL, {"turnId": "turn_0", "until": before})
    heard = await session.handle.query(names.DESCRIBE)
    gate.set()

    await session.consumed("dlv_2")
    assert (heard["cancel"], outside.concluded) == (None, [])


async def test_a_late_cancel_spares_a_message_whose_turn_has_not_begun(bench: Bench, outside: Outside) -> None:
    away = Bench(bench.client)
    session = await away.start(outside)
    before, now = "2026-11-20T12:01:00.000000Z", "2026-11-20T12:02:00.000000Z"
    await session.deliver("dlv_2", at=now, mode="interrupt", supersedes=now)
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0", "until": before})

    async with away.working(outside):
        await session.consumed("dlv_2")

    assert outside.concluded == []


async def test_a_cancel_of_what_waits_stops_the_turn_that_this_begins(bench: Bench, outside: Outside) -> None:
    begun = asyncio.Event()

    async def holds(call: ModelCall) -> ModelOutcome:
        begun.set()
        return await held(call)

    outside.answer = holds
    session = await bench.start(outside)
    now = "2026-11-20T12:02:00.000000Z"
    await session.deliver("dlv_2", at=now)
    await begun.wait()

    await session.handle.signal(names.CANCEL, {"turnId": "turn_0", "until": now})

    await outside.until(lambda: bool(outside.concluded))
    assert [(made.kind, made.at.turn) for made in outside.concluded] == [("cancelled", 0)]


async def test_a_cancel_that_comes_before_the_turn_it_means_stops_that_one(bench: Bench, outside: Outside) -> None:
    """Readers may know that a turn has ended before its driver does."""
    begun, gate = asyncio.Event(), asyncio.Event()

    async def holds_the_first(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 0:
            begun.set()
            await wait_beating(gate)
            return Finished()
        return await held(call)

    outside.answer = holds_the_first
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await begun.wait()

    await session.deliver("dlv_2")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await session.handle.query(names.DESCRIBE)
    gate.set()

    await outside.until(lambda: bool(outside.concluded))
    assert [(made.kind, made.at.turn) for made in outside.concluded] == [("cancelled", 1)]
    assert outside.consumed == ["dlv_1"]


async def test_the_end_of_a_turn_is_written_however_often_it_is_stopped(bench: Bench, outside: Outside) -> None:
    """A cancel, and then an operator who ends the session, while the end is being written."""
    concluding, may = asyncio.Event(), asyncio.Event()

    async def fails(call: ModelCall) -> ModelOutcome:
        raise ApplicationError("no", {}, type="MODEL_CALL_FAILED", non_retryable=True)

    async def before_concluding() -> None:
        concluding.set()
        await wait_beating(may)

    outside.answer = fails
    outside.before[names.CONCLUDE_TURN] = before_concluding
    session = await bench.start(outside)
    await session.deliver("dlv_1")
    await asyncio.wait_for(concluding.wait(), PATIENCE)

    await session.handle.signal(names.CANCEL, {})
    await session.handle.signal(names.REPAIR, {"how": "fail"})
    assert (await session.handle.query(names.DESCRIBE))["inTurn"] == ["dlv_1"]
    may.set()

    await outside.until(lambda: bool(outside.closed))
    assert [made.kind for made in outside.concluded] == ["failed"]
    assert "stop conclude_turn" not in story(await session.handle.fetch_history())
