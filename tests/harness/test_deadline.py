"""The deadline of a turn: absolute, whichever attempt in whichever process meets it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta

import pytest

from perdure import Limits, ToolContext, tool
from perdure.errors import KillsWorkers, ModelFailed
from perdure.models.base import Item, Prompt, UsageSoFar
from perdure.protocol.deliveries import Bounds
from perdure.protocol.events import Usage
from perdure.protocol.requests import CallRef, Calls, Failure, Finished, ModelOutcome
from perdure.store.engine.rows import stamp
from perdure.testing import ScriptedModel, call
from tests.support.given import read_session
from tests.support.lab import SESSION, YES, Lab, lab
from workflows import policies

SOON = Limits(turn_seconds=0.15)
HOUR = Limits(turn_seconds=3600)
EXCEEDED = "TURN_DEADLINE_EXCEEDED"


@tool(effects="pure")
def look() -> str:
    return "there"


class Hanging:
    """Says what it has used, and never replies."""

    def __init__(self) -> None:
        self.closed = False

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        try:
            yield UsageSoFar(Usage(input_tokens=7))
            await asyncio.Event().wait()
        finally:
            self.closed = True


def failure_of(outcome: ModelOutcome) -> Failure:
    assert isinstance(outcome, Finished)
    assert outcome.failure is not None
    return outcome.failure


def much_later(it: Lab, hours: float = 2) -> None:
    """From now on another worker works, so many hours later."""
    it.harness = it.worker(clock=lambda: time.time() + hours * 3600)


async def test_a_model_call_ends_at_the_deadline_and_the_turn_fails() -> None:
    model = Hanging()
    async with lab(model, limits=SOON) as it:
        outcome = await it.model(await it.deliver("Hi"))

        assert failure_of(outcome).code == EXCEEDED
        assert model.closed
        assert (await it.types())[-3:] == ["step.failed", "turn.failed", "session.waiting"]
        assert (await it.emitted("turn.failed"))[0]["code"] == EXCEEDED
        assert (await read_session(it.store, SESSION)).usage == Usage(input_tokens=7)


async def test_instructions_that_hang_end_at_the_deadline_too() -> None:
    async def hang(_: object) -> str:
        await asyncio.Event().wait()
        return ""

    async with lab(["Hello"], limits=SOON, instructions=hang) as it:
        assert failure_of(await it.model(await it.deliver("Hi"))).code == EXCEEDED


async def test_a_task_fails_with_its_only_turn() -> None:
    async with lab(Hanging(), limits=SOON, mode="task") as it:
        await it.model(await it.deliver("Hi"))

        assert (await it.emitted("session.failed"))[0]["code"] == EXCEEDED


async def test_an_attempt_after_the_deadline_calls_no_model_and_fails_the_turn_once() -> None:
    model = ScriptedModel([ModelFailed("Busy.", transient=True), "Hello"])
    async with lab(model, limits=HOUR) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)
        much_later(it)

        outcomes = [await it.model(delivery, generation=number) for number in (2, 3)]

        assert [failure_of(outcome).code for outcome in outcomes] == [EXCEEDED, EXCEEDED]
        assert len(model.prompts) == 1
        assert len(await it.emitted("turn.failed")) == 1


async def test_a_failed_attempt_is_repeated_at_the_deadline_at_the_latest() -> None:
    busy = ModelFailed("Busy.", transient=True, retry_after=300)
    async with lab([busy], limits=Limits(turn_seconds=20)) as it:
        with pytest.raises(ModelFailed) as failed:
            await it.model(await it.deliver("Hi"))

        assert failed.value.retry_after is not None
        assert 10 < failed.value.retry_after <= 20


async def test_a_deadline_leaves_shorter_pauses_alone() -> None:
    async with lab([ModelFailed("Busy.", transient=True)], limits=HOUR) as it:
        with pytest.raises(ModelFailed) as failed:
            await it.model(await it.deliver("Hi"), number=3)

        assert failed.value.retry_after == 2


async def test_the_time_of_tools_counts() -> None:
    model = ScriptedModel([call("look"), "Found."])
    async with lab(model, look, limits=HOUR) as it:
        await it.run_one()
        much_later(it)

        outcome = await it.model(step=1)

        assert failure_of(outcome).code == EXCEEDED
        assert len(model.prompts) == 1


async def test_a_tool_ends_at_the_deadline() -> None:
    cancelled = asyncio.Event()

    @tool(timeout=60)
    async def wait(ctx: ToolContext) -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    async with lab([call("wait")], wait, limits=SOON) as it:
        outcome = await it.run_one()

        assert outcome.status == "failed"
        assert cancelled.is_set()
        assert "before the deadline of its turn" in (await it.emitted("action.result"))[0]["result"]["output"]
        assert failure_of(await it.model(step=1)).code == EXCEEDED


async def test_a_call_does_not_begin_after_the_deadline() -> None:
    ran: list[str] = []

    @tool
    def note() -> None:
        ran.append("noted")

    async with lab([call("note")], note, limits=HOUR) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        much_later(it)

        outcome = await it.tool(ref)

        assert (outcome.status, ran) == ("failed", [])
        assert (await it.emitted("action.result"))[0]["error"]["code"] == EXCEEDED


async def test_a_call_that_may_have_run_before_the_deadline_is_unknown() -> None:
    release = asyncio.Event()

    @tool(effects="idempotent")
    async def pay() -> str:
        """Pay."""
        await release.wait()
        return "paid"

    async with lab([call("pay")], pay, limits=HOUR) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        died = asyncio.create_task(it.tool(ref, generation=1))
        while await it.store.record(SESSION, 0, 0, f"intent/{ref.call_id}") is None:
            await asyncio.sleep(0.005)
        died.cancel()
        much_later(it)

        outcome = await it.tool(ref, generation=2)

        assert outcome.status == "unknown"


async def test_the_time_in_which_people_are_asked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    @tool(approval="always", effects="pure")
    def pay() -> None:
        ran.append("paid")

    async with lab([call("pay"), "Paid."], pay, limits=HOUR, can_ask=True) as it:
        (asked,) = await it.parked(await it.deliver("Pay"))
        much_later(it)
        now = stamp(datetime.now(UTC) + timedelta(hours=2))
        monkeypatch.setattr(it.store, "_now", lambda: now)
        resumed = await it.resume(await it.answer((asked, YES)), open=[asked])

        outcome = await it.run_approved(resumed.calls[0])

        assert (outcome.status, ran) == ("completed", ["paid"])
        ended = await it.model(turn=1)
        assert isinstance(ended, Finished)
        assert ended.failure is None


async def test_the_turn_that_reads_an_answer_has_a_deadline_of_its_own() -> None:
    ran: list[str] = []

    @tool(approval="always", effects="pure")
    def pay() -> None:
        ran.append("paid")

    async with lab([call("pay"), "Paid."], pay, limits=HOUR, can_ask=True) as it:
        (asked,) = await it.parked(await it.deliver("Pay"))
        resumed = await it.resume(await it.answer((asked, YES)), open=[asked])
        much_later(it)

        outcome = await it.run_approved(resumed.calls[0])

        assert (outcome.status, ran) == ("failed", [])
        assert failure_of(await it.model(turn=1)).code == EXCEEDED


async def test_without_a_number_of_attempts_only_the_deadline_ends_them() -> None:
    busy = [ModelFailed("Busy.", transient=True)] * 2
    async with lab(busy, limits=Limits(turn_seconds=3600, max_attempts=None)) as it:
        delivery = await it.deliver("Hi")
        for number in (6, 500):
            with pytest.raises(ModelFailed):
                await it.model(delivery, generation=number)
        much_later(it)

        assert failure_of(await it.model(delivery, generation=501)).code == EXCEEDED


async def test_fewer_attempts_hold_for_a_provider_that_fails_too() -> None:
    async with lab([ModelFailed("Busy.", transient=True)], limits=Limits(max_attempts=2)) as it:
        assert failure_of(await it.model(await it.deliver("Hi"), number=2)).message == "Busy."


@pytest.mark.parametrize(("most", "attempts"), [(10, 12), (3, 5), (None, 0)])
async def test_calls_have_as_many_attempts(most: int | None, attempts: int) -> None:
    @tool(effects="idempotent", retries=2)
    def note() -> None: ...

    async with lab([call("note")], note, limits=Limits(turn_seconds=60, max_attempts=most)) as it:
        (ref,) = await it.calls(await it.deliver("Go"))

        assert ref.attempts == attempts


@pytest.mark.parametrize(("most", "refused"), [(3, True), (4, False), (None, False)])
async def test_a_step_that_has_killed_too_many_workers_is_not_attempted_again(most: int | None, refused: bool) -> None:
    expected = pytest.raises(KillsWorkers, match="died in 3 attempts") if refused else contextlib.nullcontext()
    async with lab([call("look"), "Over."], look, limits=Limits(max_deaths=most)) as it:
        delivery = await it.deliver("Go")
        with expected:
            await it.model(delivery, generation=4, deaths=3)
        (ref,) = await it.calls(delivery) if refused else await it.calls()
        # A reply that is recorded already is no attempt.
        assert isinstance(await it.model(delivery, generation=9, deaths=9), Calls)
        with expected:
            await it.tool(ref, generation=4, deaths=3)
        done = await it.tool(ref, generation=5)

        # Its outcome, too.
        assert await it.tool(ref, generation=9, deaths=9) == done


def test_the_policies_follow_the_bounds_of_the_session() -> None:
    unlimited = Bounds(attempts=0, turn_seconds=60)

    assert policies.model(Bounds(deadline=5)) is policies.MODEL
    assert policies.model(Bounds(attempts=3)).retry.maximum_attempts == 3
    assert policies.model(unlimited).retry.maximum_attempts == 0
    # Even then an attempt that dies before it can look at the clock is not repeated for ever.
    for policy in (policies.model(unlimited), policies.tool(CallRef(call_id="a", tool="a", attempts=0), unlimited)):
        assert policy.schedule_to_close == timedelta(seconds=660)
    assert policies.tool(CallRef(call_id="a", tool="a"), unlimited).schedule_to_close is None
