"""Runs without Temporal: the real records and the real order of calls, with a clock that sleeps set."""

import asyncio
from datetime import date, timedelta
from itertools import count
from typing import Any

import pytest
from pydantic import BaseModel

from examples.nightly import Nightly, nightly, writer
from perdure import Agent, RunContext, RunStepFailed, StepOutcomeUnknown, run
from perdure.errors import AgentGone, Invalid, RunDiverged
from perdure.testing import PlayedStep, ScriptedModel, call, play_run

DONE: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_is_done() -> None:
    DONE.clear()


async def do(what: str) -> str:
    DONE.append(what)
    return what


async def test_the_example_is_played_with_its_agent() -> None:
    model = ScriptedModel(["A good night."])

    played = await play_run(nightly, Nightly(day=date(2027, 1, 31), pause=3600), agents=[writer], model=model)

    assert played.result == {"total": 42, "text": "A good night.", "sent": True}
    assert [step.name for step in played.steps] == ["count-north", "count-south", "sleep", "writer", "send"]
    assert played.logs == (("info", "counted"),)
    assert len(model.prompts) == 1


async def test_input_may_be_json_and_must_fit() -> None:
    with pytest.raises(Invalid, match="Invalid input for nightly: day"):
        await play_run(nightly, {"day": "tomorrow"}, agents=[writer])


async def test_what_a_run_dispatches_is_shown_once() -> None:
    @run(name="handing")
    async def handing(ctx: RunContext, _: Any) -> str:
        receipt = await ctx.dispatch("clerk", "desk", {"day": 1}, queue_mode="steer")
        await ctx.step("after", do, "after", effects="idempotent")
        return receipt.dispatch_id

    played = await play_run(handing, dies_in=["after"])

    [handed] = played.dispatched
    assert (handed.agent, handed.to, handed.input, handed.queue_mode) == ("clerk", "desk", {"day": 1}, "steer")
    assert played.result == handed.dispatch_id


async def test_a_sleep_of_days_takes_no_time_and_does_no_step_again() -> None:
    @run(name="slow")
    async def slow(ctx: RunContext, _: Any) -> str:
        await ctx.step("before", do, "before")
        await ctx.sleep(timedelta(days=30))
        return await ctx.step("after", do, "after")

    played = await play_run(slow)

    assert (played.status, played.result, DONE) == ("completed", "after", ["before", "after"])
    assert played.steps[0] == PlayedStep("before", "step", "completed", "before", None)


async def test_a_question_is_answered() -> None:
    @run(name="asker")
    async def asker(ctx: RunContext, _: Any) -> str:
        return f"{await ctx.ask('Which color?', ['red', 'blue'])}, {await ctx.ask('Why?')}"

    played = await play_run(asker)
    assert (played.status, played.pending[0].prompt) == ("active", "Which color?")
    with pytest.raises(AssertionError, match="has no result, it waits for an answer"):
        _ = played.result
    with pytest.raises(AssertionError, match="has no option 'green'; it has 'red', 'blue'"):
        await played.answer("Which color?", "green")

    played = await played.answer("Which color?", "red")
    played = await played.answer(played.pending[0].request_id, "So it is.")

    assert (played.status, played.result) == ("completed", "red, So it is.")


async def test_a_question_may_come_too_late() -> None:
    @run(name="hurried")
    async def hurried(ctx: RunContext, _: Any) -> str:
        asked = asyncio.ensure_future(ctx.ask("Go on?", ["yes"]))
        late = asyncio.ensure_future(ctx.sleep(timedelta(days=1)))
        await asyncio.wait((asked, late), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else await ctx.step("late", do, "late")

    played = await play_run(hurried)
    assert played.waiting_for is not None
    assert "a sleep until " in played.waiting_for

    assert (await played.wake()).result == "late"
    assert (await (await play_run(hurried)).answer("Go on?", "yes")).result == "yes"


async def test_what_a_run_raises_is_its_error() -> None:
    @run(name="failing")
    async def failing(ctx: RunContext, _: Any) -> None:
        raise LookupError("not there")

    played = await play_run(failing)

    assert (played.status, played.error) == ("errored", {"name": "LookupError", "message": "not there"})
    with pytest.raises(AssertionError, match="LookupError: not there"):
        _ = played.result


async def test_a_worker_may_die_in_a_step() -> None:
    @run(name="payer")
    async def payer(ctx: RunContext, _: Any) -> list[str]:
        await ctx.step("count", do, "count", effects="pure")
        try:
            await ctx.step("pay", do, "pay")
        except StepOutcomeUnknown as unknown:
            return [unknown.step]
        return []

    assert (await play_run(payer, dies_in=["pay"])).result == ["pay"]
    assert DONE == ["count", "pay"]
    DONE.clear()
    assert (await play_run(payer, dies_in=["count"])).result == []
    assert DONE == ["count", "count", "pay"]


async def test_dying_in_a_step_that_is_not_there_is_a_mistake_of_the_test() -> None:
    with pytest.raises(AssertionError, match="makes no step 'sned'"):
        await play_run(nightly, {"day": "2027-01-31"}, agents=[writer], dies_in=["sned"])


async def test_a_function_that_makes_other_calls_when_it_is_entered_again_is_found() -> None:
    numbers = count()

    @run(name="fickle")
    async def fickle(ctx: RunContext, _: Any) -> None:
        await ctx.step(f"step-{next(numbers)}", do, "x")

    with pytest.raises(
        RunDiverged, match="Call 0 of the function is step/step-1 now; the run has recorded step/step-0"
    ):
        await play_run(fickle)


async def test_a_function_that_makes_one_more_call_when_it_is_entered_again_is_found() -> None:
    numbers = count()

    @run(name="growing")
    async def growing(ctx: RunContext, _: Any) -> None:
        for each in range(1 + next(numbers)):
            await ctx.step(f"step-{each}", do, "x")

    with pytest.raises(
        RunDiverged, match="Call 1 of the function is step/step-1 now; the run has recorded no such call"
    ):
        await play_run(growing)
    assert DONE == ["x"]


async def test_an_agent_that_fails_fails_its_prompt() -> None:
    @run(name="prompter")
    async def prompter(ctx: RunContext, _: Any) -> str:
        try:
            return await ctx.prompt("writer", "hello")
        except RunStepFailed as failed:
            return failed.error

    assert (await play_run(prompter, agents=[writer], model=ScriptedModel([]))).result == "SUBAGENT_EXECUTION_FAILED"


class Answer(BaseModel):
    number: int


async def test_an_agent_gives_a_structured_result() -> None:
    @run(name="structured")
    async def structured(ctx: RunContext, _: Any) -> Any:
        return await ctx.prompt("writer", "hello", output_schema=Answer.model_json_schema())

    model = ScriptedModel([call("final_output", number=3)])

    assert (await play_run(structured, agents=[writer], model=model)).result == {"number": 3}


async def test_a_session_with_a_name_is_prompted_twice() -> None:
    @run(name="talker")
    async def talker(ctx: RunContext, _: Any) -> list[str]:
        return [await ctx.prompt("writer", each, session="desk") for each in ("one", "two")]

    model = ScriptedModel(["One", "Two"])

    assert (await play_run(talker, agents=[writer], model=model)).result == ["One", "Two"]
    assert len(model.prompts[1].messages) > len(model.prompts[0].messages)


async def test_an_agent_that_is_not_there_is_named() -> None:
    @run(name="lonely")
    async def lonely(ctx: RunContext, _: Any) -> Any:
        return await ctx.prompt("writer", "hello")

    with pytest.raises(AgentGone, match="The agent 'writer' of this run is not served here"):
        await play_run(lonely, agents=[Agent("other")])
    with pytest.raises(AgentGone, match="The agent 'writer' of this run is not served here"):
        await play_run(lonely)
