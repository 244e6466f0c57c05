"""How many calls of a step run at the same time, and which of them never begin."""

import pytest

from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import ApprovedCall, Calls, Coordinates, Finished, Resumed, ToolCall, ToolOutcome
from perdure.session.turn import StepFailed

from .test_turn import BROKEN, REQUEST, ScriptedSteps, calls, completes, finished


def many(count: int, parallel: int) -> Calls:
    return calls(*(f"t{number}" for number in range(count))).model_copy(update={"parallel": parallel})


async def test_as_many_calls_run_at_once_as_the_step_allows() -> None:
    steps = ScriptedSteps(many(10, 3), Finished())

    await finished(steps)

    assert [call.call.tool for call in steps.tool_calls] == [f"t{number}" for number in range(10)]
    assert steps.most_running == 3


async def test_approved_calls_run_so_many_at_once_too() -> None:
    at = Coordinates(session_id="ses_1", turn=2)
    approved = tuple(ApprovedCall(at=at, call=call) for call in many(10, 3).calls)
    steps = ScriptedSteps(Finished())
    steps.resumed = Resumed(calls=approved, parallel=3)
    answer = DeliveryRef(id="dlv_1", kind="answer", token_hash="now")

    await finished(steps, REQUEST.model_copy(update={"deliveries": (answer,)}))

    assert (len(steps.tool_calls), steps.most_running) == (10, 3)


async def test_no_further_call_begins_after_a_cancellation_between_them() -> None:
    steps = ScriptedSteps(many(10, 3))
    steps.stopping = steps.stopping_late = True

    result = await finished(steps)

    assert len(steps.tool_calls) == 3
    assert (result.cancelled, [made.kind for made in steps.concluded]) == (True, ["cancelled"])


async def test_no_further_call_begins_after_one_that_failed_for_good() -> None:
    def tool(call: ToolCall) -> ToolOutcome:
        if call.call.tool == "t0":
            raise StepFailed(BROKEN)
        return completes(call)

    steps = ScriptedSteps(many(10, 2), tool=tool)

    assert (await finished(steps)).failure == BROKEN
    assert len(steps.tool_calls) == 2


@pytest.mark.parametrize("reported", [("t0", "t1"), ("t1", "t0")], ids=["in order", "out of order"])
async def test_of_two_tokens_the_one_that_was_set_last_counts(reported: tuple[str, str]) -> None:
    def tool(call: ToolCall) -> ToolOutcome:
        name = call.call.tool
        return completes(call).model_copy(update={"token_hash": f"of {name}", "head": 7 if name == "t0" else 8})

    steps = ScriptedSteps(calls(*reported), Finished(), tool=tool)

    assert (await finished(steps)).token_hash == "of t1"


async def test_older_workers_do_not_report_which_token_was_set_last() -> None:
    def tool(call: ToolCall) -> ToolOutcome:
        return completes(call).model_copy(update={"token_hash": f"of {call.call.tool}"})

    steps = ScriptedSteps(calls("t0", "t1"), Finished(), tool=tool)

    assert (await finished(steps)).token_hash == "of t1"
