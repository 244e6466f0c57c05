"""A turn has a cancel request, and its workflow got no signal: every step looks for the request itself."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import tool
from perdure.errors import TurnCancelled
from perdure.models.base import Delta, Prompt, Reply
from perdure.protocol.requests import Calls, Failure, Finished
from perdure.session.decisions import CANCELLED
from perdure.store.inputs import InputQuery
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, YES, Lab, lab

from .till import Till, asked

CRASHED = Failure(code="STEP_TIMEOUT", message="The step did not end in time.")


class Paused:
    """A model that answers once it may."""

    def __init__(self, *lines: Any) -> None:
        self._model = ScriptedModel(lines)
        self.asked = asyncio.Event()
        self.may = asyncio.Event()

    @property
    def prompts(self) -> list[Prompt]:
        return self._model.prompts

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        self.asked.set()
        await self.may.wait()
        async for item in self._model.stream(prompt):
            yield item


async def cancelled_during_the_model_call(it: Lab, model: Paused) -> Any:
    calling = asyncio.create_task(it.model(await it.deliver("Go")))
    await model.asked.wait()
    await it.request_cancel()
    model.may.set()
    return await calling


async def cancel_is_settled(it: Lab) -> bool:
    row = await it.store.session(SESSION)
    return row is not None and row.cancel_turn is None


async def test_a_turn_that_has_not_begun_does_not_begin() -> None:
    model = ScriptedModel(["never"])
    async with lab(model) as it:
        delivery = await it.deliver("Go")
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.model(delivery)
        await it.cancel(delivery)

        assert model.prompts == []
        assert (await it.types())[-2:] == ["turn.cancelled", "session.waiting"]
        assert await cancel_is_settled(it)


@pytest.mark.parametrize("line", ["Well.", [call("final_output")], call("pay", amount=5)], ids=["text", "bad", "parks"])
async def test_an_answer_that_would_end_the_turn_is_kept_and_the_turn_is_cancelled(line: Any) -> None:
    model, till = Paused(line, "Again."), Till()
    async with lab(model, till.tool(), can_ask=True) as it:
        outcome = await cancelled_during_the_model_call(it, model)
        if isinstance(outcome, Calls):
            await it.cancel(turn=0)
        else:
            assert isinstance(outcome, Finished)
            assert outcome.failure == CANCELLED

        types = await it.types()
        assert types[-3:] == ["step.completed", "turn.cancelled", "session.waiting"]
        assert ("turn.completed" in types, "input.requested" in types) == (False, False)
        row = await it.store.session(SESSION)
        assert row is not None
        assert (row.usage.output_tokens, row.steps, row.cancel_turn) == (5, 1, None)
        assert isinstance(await it.model(await it.deliver("And?"), turn=1), Finished)


async def test_an_empty_answer_is_not_asked_for_once_more_and_what_it_cost_is_kept() -> None:
    model = Paused("", "never")
    async with lab(model) as it:
        outcome = await cancelled_during_the_model_call(it, model)

        assert isinstance(outcome, Finished)
        assert outcome.failure == CANCELLED
        assert len(model.prompts) == 1
        assert (await it.types())[-3:] == ["step.completed", "turn.cancelled", "session.waiting"]
        row = await it.store.session(SESSION)
        assert row is not None
        assert (row.usage.output_tokens > 0, row.cancel_turn) == (True, None)


async def test_a_result_that_has_waited_for_other_calls_does_not_end_a_turn_that_is_to_be_stopped() -> None:
    @tool(effects="pure")
    def look() -> str:
        return "seen"

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    lines = [[call("final_output", city="Oslo"), call("look")]]
    async with lab(lines, look, output_schema=schema, mode="task") as it:
        outcome = await it.model(await it.deliver("Go"))
        assert isinstance(outcome, Calls)
        for ref in outcome.calls:
            await it.tool(ref)
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.model(step=1)
        await it.cancel(step=1)

        types = await it.types()
        assert ("result.completed" in types, "turn.cancelled" in types) == (False, True)


async def test_calls_that_the_model_asks_for_do_not_begin() -> None:
    model, till = Paused(call("pay", amount=5), "Again."), Till()
    async with lab(model, till.tool(approval="never")) as it:
        outcome = await cancelled_during_the_model_call(it, model)
        assert isinstance(outcome, Calls)

        with pytest.raises(TurnCancelled):
            await it.tool(outcome.calls[0])
        await it.cancel()

        assert till.paid == []
        ends = ["action.result", "step.completed", "turn.cancelled", "session.waiting"]
        assert (await it.types())[-4:] == ends
        assert await cancel_is_settled(it)


async def test_another_attempt_at_a_call_does_not_begin() -> None:
    tried: list[int] = []

    @tool(effects="idempotent", retries=3)
    async def put() -> None:
        tried.append(1)
        await asyncio.Event().wait()

    async with lab([call("put")], put) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        dead = asyncio.create_task(it.tool(ref))
        while not tried:
            await asyncio.sleep(0)
        dead.cancel()
        await asyncio.wait([dead])
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.tool(ref, generation=2)

        assert len(tried) == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_approved_call_does_not_begin(when: str) -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open) if when == "after" else None
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await (it.run_approved(resumed.calls[0]) if resumed else it.resume(answer, open=open))
        await it.cancel(answer, turn=1)

        assert till.paid == []
        assert (await it.types())[-2:] == ["turn.cancelled", "session.waiting"]
        assert await cancel_is_settled(it)


async def test_a_cancelled_turn_that_was_to_park_opens_no_request() -> None:
    @tool
    def look() -> str:
        return "seen"

    till = Till()
    async with lab([[call("look"), call("pay", amount=5)]], look, till.tool(), can_ask=True) as it:
        outcome = await it.model(await it.deliver("Go"))
        assert isinstance(outcome, Calls)
        await it.tool(outcome.calls[0])
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.park(outcome.open)
        await it.cancel()

        assert "input.requested" not in await it.types()
        assert (await it.store.inputs(InputQuery(session_id=SESSION))).rows == []


async def test_an_expiry_is_not_carried_out() -> None:
    till = Till()
    async with asked(till, 5, expires=60, on_expiry="approve") as (it, _, open):
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.resume(open=open, expired=open)
        await it.withdraw(open, turn=1)

        assert await it.status_of(open[0]) == "withdrawn"
        assert till.paid == []


async def test_a_turn_that_failed_meanwhile_is_emitted_as_cancelled() -> None:
    async with lab([call("act")], _act) as it:
        delivery = await it.deliver("Go")
        await it.calls(delivery)
        await it.request_cancel()

        await it.conclude(CRASHED, delivery)

        types = await it.types()
        assert (types[-2:], "turn.failed" in types) == (["turn.cancelled", "session.waiting"], False)
        assert await cancel_is_settled(it)


async def test_a_cancel_request_that_comes_while_a_failure_is_written_wins() -> None:
    async with lab([call("act")], _act) as it:
        delivery = await it.deliver("Go")
        await it.calls(delivery)

        await asyncio.gather(it.conclude(CRASHED, delivery), it.request_cancel())

        types = await it.types()
        ended = [each for each in types if each in ("turn.failed", "turn.cancelled")]
        assert len(ended) == 1
        assert ("cancel.requested" in types) == (ended == ["turn.cancelled"])


async def test_the_next_turn_is_not_stopped_by_the_cancel_request_of_the_one_before() -> None:
    async with lab(["One.", "Two."]) as it:
        delivery = await it.deliver("Go")
        await it.request_cancel()
        with pytest.raises(TurnCancelled):
            await it.model(delivery)
        await it.cancel(delivery)

        assert isinstance(await it.model(await it.deliver("Again"), turn=1), Finished)
        assert (await it.types())[-1] == "session.waiting"


@tool
def _act() -> str:
    return "done"
