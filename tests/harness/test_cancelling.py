"""A turn is cancelled: what has happened stays emitted, what has not is never done, and nothing late can write."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import tool
from perdure.errors import Superseded
from perdure.models.base import Delta, Prompt, Reply, TextDelta
from perdure.protocol.requests import Calls, Failure, Finished, Resumed
from perdure.session.decisions import CANCELLED
from perdure.testing import ScriptedModel, call
from tests.support.lab import NO, YES, Lab, lab


class Endless:
    """A model that begins to stream and never ends."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        try:
            yield TextDelta("Once upon a time ")
            self.started.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


def failure_of(end: object) -> Failure | None:
    return end.failure if isinstance(end, Finished) else None


@tool
def act() -> str:
    return "done"


@tool(approval="always")
def pay() -> str:
    raise AssertionError("this must not run")


async def until_emitted(it: Lab, type: str) -> None:
    async with it.store.watch("s1") as watch:
        while type not in await it.types():
            await watch.changed()


async def test_a_turn_that_never_began_emits_that_it_was_cancelled() -> None:
    model = ScriptedModel(["Hello"])
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        await it.cancel(delivery)

        assert await it.types() == [
            "session.started",
            "turn.started",
            "message.received",
            "turn.cancelled",
            "session.waiting",
        ]
        assert await it.emitted("turn.cancelled") == [{"sequence": 0, "turnId": "turn_0"}]
        assert await it.session_status() == "waiting"
        assert failure_of(await it.model(delivery, generation=9)) == CANCELLED
        await it.model(await it.deliver("Again"), turn=1)
        assert [part.content for part in model.prompts[0].messages[0].parts] == ["Hi", "Again"]  # type: ignore


async def test_a_model_call_is_closed_at_once_and_what_was_shown_stays() -> None:
    model = Endless()
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        running = asyncio.create_task(it.model(delivery))
        await until_emitted(it, "message.appended")

        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert model.closed.is_set()
        await it.cancel(delivery)

        assert (await it.types())[-3:] == ["message.appended", "turn.cancelled", "session.waiting"]


async def test_a_model_call_that_continues_can_write_nothing_more() -> None:
    model = Endless()
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        zombie = asyncio.create_task(it.model(delivery))
        await until_emitted(it, "message.appended")
        await it.cancel(delivery)
        before = await it.events()
        model.started.set()

        zombie.cancel()
        await asyncio.wait([zombie])

        assert await it.events() == before


class Slow:
    """A model that answers when it may."""

    def __init__(self, line: Any) -> None:
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self._script = ScriptedModel([line])

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        self.asked.set()
        await self.may.wait()
        async for item in self._script.stream(prompt):
            yield item


@pytest.mark.parametrize("line", ["Too late.", call("act"), call("pay")])
async def test_an_answer_that_comes_after_the_cancellation_is_lost(line: Any) -> None:
    model = Slow(line)
    async with lab(model, act, pay, can_ask=True) as it:
        delivery = await it.deliver("Hi")
        zombie = asyncio.create_task(it.model(delivery))
        await model.asked.wait()
        await it.cancel(delivery)
        before = await it.events()
        model.may.set()

        (end,) = await asyncio.gather(zombie, return_exceptions=True)
        assert isinstance(end, Superseded) or failure_of(end) == CANCELLED
        assert await it.events() == before


async def test_results_of_cancelled_calls_report_whether_they_began() -> None:
    started = asyncio.Event()

    @tool
    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    model = ScriptedModel([[call("act"), call("hang"), call("act")], "Sorry"])
    async with lab(model, act, hang) as it:
        delivery = await it.deliver("Go")
        done, hangs, never = await it.calls(delivery)
        await it.tool(done)
        running = asyncio.create_task(it.tool(hangs))
        await started.wait()
        running.cancel()
        await asyncio.wait([running])
        await it.cancel(delivery)

        ends = ["action.result", "action.result", "step.completed", "turn.cancelled", "session.waiting"]
        assert (await it.types())[-5:] == ends
        assert (await it.tool(never, generation=9)).status == "failed"
        await it.model(await it.deliver("And?"), turn=1)
        results = [part.content for part in model.prompts[1].messages[2].parts][:3]  # type: ignore[union-attr]
        assert results[0] == "done"
        assert "Outcome unknown: the call was interrupted" in str(results[1])  # type: ignore
        assert results[2] == "This call was cancelled before it was executed."


async def test_a_tool_in_a_thread_is_notified_and_its_late_outcome_is_lost() -> None:
    started, may = threading.Event(), threading.Event()

    @tool
    def block() -> str:
        started.set()
        may.wait(60)
        return "too late"

    async with lab([call("block")], block) as it:
        delivery = await it.deliver("Go")
        (ref,) = await it.calls(delivery)
        zombie = asyncio.create_task(it.tool(ref))
        await asyncio.to_thread(started.wait, 60)
        await it.cancel(delivery)
        before = await it.events()

        may.set()
        assert (await zombie).status == "unknown"

        assert await it.events() == before


async def test_a_cancelled_step_does_not_end_before_the_thread_of_its_tool() -> None:
    started, may, acted = threading.Event(), threading.Event(), threading.Event()

    @tool
    def block() -> None:
        started.set()
        may.wait(60)
        acted.set()

    async with lab([call("block")], block) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        step = asyncio.create_task(it.tool(ref))
        await asyncio.to_thread(started.wait, 60)

        step.cancel()
        still = await asyncio.wait({step}, timeout=0.2)
        may.set()
        await asyncio.wait({step})

        assert still == (set(), {step})
        assert acted.is_set()
        assert step.cancelled()


async def test_a_turn_that_had_just_ended_stays_ended() -> None:
    async with lab(["Hello"]) as it:
        delivery = await it.deliver("Hi")
        await it.model(delivery)
        before = await it.events()

        await it.cancel(delivery)

        assert await it.events() == before


async def test_cancelling_twice_is_cancelling_once() -> None:
    async with lab([call("pay")], pay, can_ask=True) as it:
        delivery = await it.deliver("Hi")
        open = await it.parked(delivery)
        await it.cancel(delivery)
        before = await it.events()

        await it.cancel(delivery)
        await it.withdraw(open)

        assert await it.events() == before


async def test_a_cancelled_turn_that_had_just_parked_withdraws_its_requests() -> None:
    model = ScriptedModel([[call("pay"), call("ask_question", prompt="Why?")], "I see."])
    async with lab(model, pay, can_ask=True) as it:
        delivery = await it.deliver("Pay")
        open = await it.parked(delivery)

        await it.cancel(delivery)

        assert (await it.types())[-6:] == [
            "session.waiting",
            "input.resolved",
            "input.resolved",
            "action.result",
            "turn.cancelled",
            "session.waiting",
        ]
        assert [emitted["status"] for emitted in await it.emitted("input.resolved")] == ["withdrawn"] * 2
        assert [await it.status_of(each) for each in open] == ["withdrawn"] * 2
        await it.model(await it.deliver("Well"), turn=1)
        results = [part.content for part in model.prompts[1].messages[2].parts]  # type: ignore[union-attr]
        assert results == ["This call was cancelled before it was executed.", {"status": "ignored"}, "Well"]


async def test_a_park_after_the_cancellation_opens_no_request() -> None:
    async with lab([[call("act"), call("pay")]], act, pay, can_ask=True) as it:
        delivery = await it.deliver("Go")
        outcome = await it.model(delivery)
        assert isinstance(outcome, Calls)
        await it.tool(outcome.calls[0])
        await it.cancel(delivery)
        before = await it.events()

        await it.park(outcome.open)

        assert await it.events() == before
        assert await it.status_of(outcome.open[0]) == "unknown"


async def test_withdrawing_a_parked_turn_cancels_it() -> None:
    async with lab([call("pay"), "Well."], pay, can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay"))

        await it.withdraw(open)
        before = await it.events()
        await it.withdraw(open)

        assert await it.events() == before
        assert (await it.types())[-4:] == ["input.resolved", "action.result", "turn.cancelled", "session.waiting"]


async def test_an_approval_that_was_not_carried_out_yet_is_cancelled_with_its_turn() -> None:
    async with lab([call("pay"), "Well."], pay, can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay"))
        answer = await it.answer((open[0], YES))

        await it.withdraw(open)

        assert await it.resume(answer) == Resumed()
        await it.model(answer, turn=1)
        assert (await it.emitted("action.result"))[0]["status"] == "rejected"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_resumed_turn_can_be_cancelled_before_its_calls_run(when: str) -> None:
    async with lab([[call("pay"), call("pay")], "Well."], pay, can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay"))
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open) if when == "after" else None

        await it.cancel(answer, turn=1)

        assert [await it.status_of(each) for each in open] == ["answered", "withdrawn"]
        assert (await it.types())[-4:] == ["action.result", "action.result", "turn.cancelled", "session.waiting"]
        before = await it.events()
        late = await it.resume(answer, open=open, generation=9)
        if resumed:
            assert (await it.run_approved(resumed.calls[0], generation=9)).status == "rejected"
        else:
            assert late.failure == CANCELLED
        assert await it.events() == before


async def test_a_cancelled_task_ends_the_session() -> None:
    async with lab([call("pay")], pay, can_ask=True, mode="task") as it:
        open = await it.parked(await it.deliver("Pay"))

        await it.withdraw(open)

        (emitted,) = await it.emitted("session.failed")
        assert emitted["code"] == "TURN_CANCELLED"
        assert await it.session_status() == "failed"


async def test_a_turn_that_resumed_and_then_failed_leaves_no_call_open() -> None:

    crashed = Failure(code="STEP_FAILED", message="The step could not be done.")
    model = ScriptedModel([[call("pay"), call("pay"), call("pay")], "Well."])
    async with lab(model, pay, can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay"))
        answer = await it.answer((open[0], YES), (open[1], NO))
        await it.resume(answer, open=open)

        await it.conclude(crashed, answer, turn=1)

        assert [await it.status_of(each) for each in open] == ["answered", "answered", "withdrawn"]
        assert len(await it.emitted("action.result")) == 3
        assert (await it.types())[-2:] == ["turn.failed", "session.waiting"]
        await it.model(await it.deliver("And?"), turn=2)
        assert len(model.prompts[1].messages[2].parts) == 4
