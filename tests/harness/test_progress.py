"""A turn in which nothing happens any more is stopped."""

from itertools import count
from typing import Any

import pytest

from perdure import Limits, tool
from perdure.protocol.requests import CallRef, Calls, Finished, ModelOutcome
from perdure.testing import ScriptedModel, call
from tests.support.lab import Lab, lab

NUMBERS = count()


@tool(effects="pure")
def look(where: str = "here") -> str:
    return "nothing"


@tool(effects="pure")
def ask_clock() -> int:
    return next(NUMBERS)


@tool(effects="pure")
def fail() -> str:
    raise ValueError("no")


async def steps(it: Lab, most: int = 20) -> tuple[ModelOutcome, int]:
    """Play steps until the turn ends; its outcome, and how many steps there were."""
    delivery = [await it.deliver("Go")]
    for step in range(most):
        outcome = await it.model(*delivery, step=step)
        if not isinstance(outcome, Calls):
            return outcome, step
        refs: tuple[CallRef, ...] = outcome.calls
        for ref in refs:
            await it.tool(ref, step=step)
        delivery = []
    raise AssertionError("the turn goes on")


def code_of(outcome: ModelOutcome) -> str | None:
    assert isinstance(outcome, Finished)
    return outcome.failure.code if outcome.failure else None


@pytest.mark.parametrize("line", [call("look"), call("fail"), [call("ask_clock"), call("look")]])
async def test_a_model_that_repeats_a_call_with_the_same_result_is_stopped(line: Any) -> None:
    model = ScriptedModel([line] * 20)
    async with lab(model, look, ask_clock, fail) as it:
        outcome, step = await steps(it)

        assert (code_of(outcome), step, len(model.prompts)) == ("NO_PROGRESS", 5, 5)
        (failed,) = await it.emitted("turn.failed")
        assert failed["details"] == {"toolName": "fail" if line == call("fail") else "look", "times": 5}


@pytest.mark.parametrize(
    "lines",
    [
        [call("ask_clock")] * 9,
        [call("look", where=str(number)) for number in range(9)],
        [call("look"), call("fail")] * 4,
        [call("look")] * 4 + [call("ask_clock")] + [call("look")] * 4,
    ],
)
async def test_calls_that_differ_or_have_other_results_go_on(lines: list[Any]) -> None:
    async with lab([*lines, "Done."], look, ask_clock, fail) as it:
        outcome, step = await steps(it)

        assert (code_of(outcome), step) == (None, len(lines))


async def test_the_number_can_be_set_or_be_without_a_limit() -> None:
    for most, ends in ((2, (None, 2)), (None, (None, 9))):
        async with lab([call("look")] * 9 + ["Done."], look, limits=Limits(repeated_calls=most)) as it:
            outcome, step = await steps(it)

            assert (code_of(outcome), step) == (("NO_PROGRESS", 2) if most else ends)


async def test_the_next_turn_may_make_the_same_call() -> None:
    async with lab([call("look")] * 3 + ["Done."], look, limits=Limits(repeated_calls=2)) as it:
        await steps(it)

        (ref,) = await it.calls(await it.deliver("Again"), turn=1)

        assert ref.tool == "look"
