"""The loop of a turn, over steps that a test scripts."""

import asyncio
from collections.abc import Callable

import pytest

from perdure.protocol.actions import Done, Park
from perdure.protocol.deliveries import AWAITED, DeliveryRef
from perdure.protocol.events import Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    ApprovedCall,
    CallRef,
    Calls,
    Concluded,
    Conclusion,
    Coordinates,
    Failure,
    Finished,
    ModelCall,
    ModelOutcome,
    NothingToRead,
    Parked,
    ParkTurn,
    ProgramOutcome,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
)
from perdure.session.decisions import CANCELLED, conclusion
from perdure.session.turn import ContinueAsNew, StepFailed, run_turn

REQUEST = TurnRequest(session_id="ses_1", turn=3, agent="demo", deliveries=(DeliveryRef(id="dlv_1", token_hash="now"),))
BROKEN = Failure(code="STORE_GONE", message="The store is gone.")
GONE = Failure(code="AGENT_GONE", message="The agent is not served here.")
HELD_BY = REQUEST.model_copy(update={"holds": True})
CALL = CallRef(call_id="call_1", tool="pay")


def completes(call: ToolCall) -> ToolOutcome:
    return ToolOutcome(call_id=call.call.call_id, status="completed")


class ScriptedSteps:
    """Answers with one outcome after the other and remembers what it was asked."""

    def __init__(self, *outcomes: ModelOutcome | StepFailed, tool: Callable[[ToolCall], ToolOutcome] | None = None):
        self._outcomes = list(outcomes)
        self._tool = tool or completes
        self.model_calls: list[ModelCall] = []
        self.labels: list[str | None] = []
        self.tool_calls: list[ToolCall] = []
        self.concluded: list[Conclusion] = []
        self.continues_as_new_after = 10_000
        self.resumed = Resumed()
        self.programs: list[ProgramOutcome] = []
        self.program_calls: list[ToolCall] = []
        self.resumptions: list[ResumeTurn] = []
        self.parks: list[ParkTurn] = []
        self.stopping = False
        # Only once the calls have begun.
        self.stopping_late = False
        self.children_end_first = True
        self.conclusion = Concluded()
        self.running = 0
        self.most_running = 0

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        self.labels.append(label)
        self.model_calls.append(call)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, StepFailed):
            raise outcome
        return outcome

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        self.tool_calls.append(call)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0)
        self.running -= 1
        return self._tool(call)

    def parallel(self, limit: int | None, calls: int) -> int:
        return limit or calls

    async def run_program(self, call: ToolCall) -> ProgramOutcome:
        self.program_calls.append(call)
        return self.programs.pop(0)

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        self.resumptions.append(resumption)
        return self.resumed

    async def park(self, park: ParkTurn) -> None:
        self.parks.append(park)

    def cancelled(self, *, early: bool = False) -> bool:
        return self.stopping and (not early or not self.stopping_late)

    def ends_after_children(self) -> bool:
        return self.children_end_first

    async def conclude(self, conclusion: Conclusion) -> Concluded:
        self.concluded.append(conclusion)
        return self.conclusion

    def should_continue_as_new(self) -> bool:
        return len(self.model_calls) >= self.continues_as_new_after


def calls(*names: str) -> Calls:
    return Calls(calls=tuple(CallRef(call_id=name, tool=name) for name in names), usage=Usage(output_tokens=1))


async def finished(steps: ScriptedSteps, request: TurnRequest = REQUEST) -> TurnResult:
    result = await run_turn(request, steps)
    assert isinstance(result, TurnResult)
    return result


async def test_a_text_turn_is_one_model_call() -> None:
    steps = ScriptedSteps(Finished())

    result = await finished(steps)

    assert len(steps.model_calls) == 1
    assert (result.action, result.failure) == (Park(), None)


async def test_only_the_first_step_reads_the_deliveries() -> None:
    steps = ScriptedSteps(calls("a"), Finished())

    await finished(steps)

    assert [len(call.deliveries) for call in steps.model_calls] == [1, 0]


async def test_all_calls_of_a_step_run_before_the_next_step() -> None:
    steps = ScriptedSteps(calls("a", "b"), Finished())

    await finished(steps)

    assert [call.call.tool for call in steps.tool_calls] == ["a", "b"]
    assert [call.at.step for call in steps.model_calls] == [0, 1]


async def test_a_task_ends_its_session() -> None:
    result = await finished(ScriptedSteps(Finished()), REQUEST.model_copy(update={"mode": "task"}))

    assert result.action == Done()


async def test_a_failed_task_ends_its_session_as_an_error() -> None:
    result = await finished(ScriptedSteps(Finished(failure=BROKEN)), REQUEST.model_copy(update={"mode": "task"}))

    assert result.action == Done(is_error=True)


async def test_a_recoverable_failure_parks_the_session() -> None:
    result = await finished(ScriptedSteps(Finished(failure=BROKEN)))

    assert (result.action, result.failure) == (Park(), BROKEN)


async def test_a_structural_failure_ends_the_session() -> None:
    result = await finished(ScriptedSteps(Finished(failure=BROKEN.model_copy(update={"structural": True}))))

    assert result.action == Done(is_error=True)


async def test_a_step_that_failed_for_good_is_concluded_once() -> None:
    steps = ScriptedSteps(StepFailed(BROKEN))

    result = await finished(steps)

    assert [(made.failure, made.at.turn, len(made.deliveries)) for made in steps.concluded] == [(BROKEN, 3, 1)]
    assert result.action == Park()


async def test_a_failing_call_does_not_abandon_its_siblings() -> None:
    ended: list[str] = []

    def tool(call: ToolCall) -> ToolOutcome:
        if call.call.tool == "a":
            raise StepFailed(BROKEN)
        ended.append(call.call.tool)
        return ToolOutcome(call_id=call.call.call_id, status="completed")

    steps = ScriptedSteps(calls("a", "b"), tool=tool)

    result = await finished(steps)

    assert ended == ["b"]
    assert result.failure == BROKEN


async def test_a_token_that_a_tool_set_reaches_the_driver() -> None:
    steps = ScriptedSteps(
        calls("a"), Finished(), tool=lambda call: ToolOutcome(call_id="a", status="completed", token_hash="next")
    )

    assert (await finished(steps)).token_hash == "next"


async def test_a_long_turn_continues_where_it_stopped() -> None:
    steps = ScriptedSteps(calls("a"), Finished())
    steps.continues_as_new_after = 1

    continuation = await run_turn(REQUEST, steps)

    assert isinstance(continuation, ContinueAsNew)
    steps.continues_as_new_after = 10_000
    await finished(steps, continuation.request)
    assert [call.at.step for call in steps.model_calls] == [0, 1]
    assert steps.model_calls[1].deliveries == ()


async def test_a_turn_without_a_delivery_parks() -> None:
    task = REQUEST.model_copy(update={"mode": "task"})
    for request in (REQUEST, task):
        assert (await finished(ScriptedSteps(NothingToRead()), request)).action == Park()


@pytest.mark.parametrize("rounds", [1, 5])
async def test_usage_is_summed_over_the_steps(rounds: int) -> None:
    steps = ScriptedSteps(*[calls("a") for _ in range(rounds)], Finished(usage=Usage(output_tokens=1)))

    result = await finished(steps)

    assert result.snapshot.data["usage"]["outputTokens"] == rounds + 1


ASKED = OpenInput(request_id="inp_1")
SHOWN = OpenInput(request_id="inp_1", first_shown=(3, 0))
ANSWERED = REQUEST.model_copy(
    update={"deliveries": (DeliveryRef(id="dlv_2", kind="answer", token_hash="now"),), "open": (ASKED,)}
)


async def test_a_turn_that_waits_for_people_parks_after_the_other_calls() -> None:
    steps = ScriptedSteps(Calls(calls=calls("a").calls, open=(ASKED,)))

    result = await finished(steps)

    assert [call.call.tool for call in steps.tool_calls] == ["a"]
    assert [park.open for park in steps.parks] == [(SHOWN,)]
    assert (result.action, result.open) == (Park(), (SHOWN,))


async def test_a_turn_that_only_waits_needs_no_extra_step_to_park() -> None:
    steps = ScriptedSteps(Parked(open=(ASKED,)))

    result = await finished(steps)

    assert (steps.parks, result.open) == ([], (SHOWN,))


async def test_a_task_that_waits_does_not_end() -> None:
    result = await finished(ScriptedSteps(Parked(open=(ASKED,))), REQUEST.model_copy(update={"mode": "task"}))

    assert result.action == Park()


async def test_an_approved_call_is_recorded_where_it_was_asked_and_emitted_where_it_runs() -> None:
    asked_at = Coordinates(session_id="ses_1", turn=2, step=1)
    steps = ScriptedSteps(Finished())
    steps.resumed = Resumed(calls=(ApprovedCall(at=asked_at, call=CallRef(call_id="a", tool="a")),))

    result = await finished(steps, ANSWERED)

    assert [(call.at, call.told_at and call.told_at.turn) for call in steps.tool_calls] == [(asked_at, 3)]
    assert (len(steps.model_calls), result.open) == (1, ())


async def test_the_model_is_not_asked_while_a_request_is_open() -> None:
    other = OpenInput(request_id="inp_2", first_shown=(1, 4))
    steps = ScriptedSteps()
    steps.resumed = Resumed(open=(other,))

    result = await finished(steps, ANSWERED.model_copy(update={"open": (ASKED, other)}))

    assert steps.model_calls == []
    assert [park.open for park in steps.parks] == [(other,)]
    assert result.open == (other,)


async def test_nobody_guesses_where_a_request_of_an_older_build_was_shown_first() -> None:
    steps = ScriptedSteps()
    steps.resumed = Resumed(open=(ASKED,))

    result = await finished(steps, ANSWERED)

    assert [park.open for park in steps.parks] == [(ASKED,)]
    assert result.open == (ASKED,)


async def test_what_a_program_asks_in_a_later_turn_is_shown_first_by_that_turn() -> None:
    program = ApprovedCall(
        at=Coordinates(session_id="ses_1", turn=2, step=1), call=CallRef(call_id="p", tool="code_mode")
    )
    before = OpenInput(request_id="inp_2", first_shown=(2, 1))
    steps = ScriptedSteps()
    steps.resumed = Resumed(kind="programs", programs=(program,), open=(before,))
    steps.programs = [ProgramOutcome(call_id="p", open=(ASKED, OpenInput(request_id="inp_2")))]

    result = await finished(steps, ANSWERED.model_copy(update={"open": (before,)}))

    assert {each.request_id: each.first_shown for each in result.open} == {"inp_1": (3, 0), "inp_2": (2, 1)}


async def test_an_expired_request_resumes_the_turn_without_a_delivery() -> None:
    steps = ScriptedSteps(Finished())

    await finished(steps, REQUEST.model_copy(update={"deliveries": (), "open": (ASKED,), "expired": ("inp_1",)}))

    assert [resumption.expired for resumption in steps.resumptions] == [("inp_1",)]
    assert len(steps.model_calls) == 1


async def test_a_request_that_expired_into_a_failure_ends_the_turn() -> None:
    steps = ScriptedSteps()
    steps.resumed = Resumed(failure=BROKEN)

    result = await finished(steps, ANSWERED)

    assert (result.failure, steps.model_calls, steps.concluded) == (BROKEN, [], [])


async def test_a_cancellation_is_concluded_once_the_work_has_stopped() -> None:
    async def stops(call: ModelCall, *, label: str | None) -> ModelOutcome:
        steps.model_calls.append(call)
        raise asyncio.CancelledError

    steps = ScriptedSteps()
    steps.call_model = stops

    result = await finished(steps)

    assert [made.kind for made in steps.concluded] == ["cancelled"]
    assert (result.cancelled, result.action) == (True, Park())


async def test_a_cancellation_counts_even_if_the_tool_was_just_ending() -> None:
    steps = ScriptedSteps(calls("a"), Finished())
    steps.stopping = steps.stopping_late = True

    result = await finished(steps)

    assert (len(steps.model_calls), len(steps.tool_calls), result.cancelled) == (1, 1, True)


async def test_no_call_begins_after_a_cancellation_that_met_the_end_of_the_model_call() -> None:
    steps = ScriptedSteps(calls("a", "b"), Finished())
    steps.stopping = True

    result = await finished(steps)

    assert (steps.tool_calls, result.cancelled) == ([], True)


async def test_no_approved_call_begins_after_a_cancellation_that_met_the_end_of_the_resume() -> None:
    steps = ScriptedSteps(Finished())
    steps.resumed = Resumed(calls=(ApprovedCall(at=Coordinates(session_id="ses_1", turn=2), call=CALL),))
    steps.stopping = True

    result = await finished(steps, ANSWERED)

    assert (steps.tool_calls, steps.model_calls, result.cancelled) == ([], [], True)


async def test_a_new_token_survives_a_sibling_that_failed() -> None:
    def tool(call: ToolCall) -> ToolOutcome:
        if call.call.tool == "fails":
            raise StepFailed(BROKEN)
        return ToolOutcome(call_id="rekeys", status="completed", token_hash="next")

    result = await finished(ScriptedSteps(calls("fails", "rekeys"), tool=tool))

    assert (result.failure, result.token_hash) == (BROKEN, "next")


async def test_all_tokens_that_were_set_are_reported_whichever_call_reports_first() -> None:
    heads = {"first": 5, "second": 9}

    def tool(call: ToolCall) -> ToolOutcome:
        name = call.call.tool
        return ToolOutcome(call_id=name, status="completed", token_hash=name, head=heads[name])

    apart = await finished(ScriptedSteps(calls("first"), calls("second"), Finished(), tool=tool))
    together = await finished(ScriptedSteps(calls("second", "first"), Finished(), tool=tool))

    assert (apart.token_hash, apart.retired) == ("second", ("first",))
    assert (together.token_hash, together.retired) == ("second", ("first",))


async def test_a_turn_that_continues_as_new_keeps_the_tokens_that_it_has_replaced() -> None:
    def tool(call: ToolCall) -> ToolOutcome:
        return ToolOutcome(call_id=call.call.tool, status="completed", token_hash=call.call.tool)

    steps = ScriptedSteps(calls("first"), calls("second"), tool=tool)
    steps.continues_as_new_after = 1
    continuation = await run_turn(REQUEST, steps)
    assert isinstance(continuation, ContinueAsNew)
    again = await run_turn(continuation.request, steps)
    assert isinstance(again, ContinueAsNew)

    assert (again.request.token_hash, again.request.retired) == ("second", ("first",))


async def test_a_new_token_survives_a_cancellation_in_the_middle_of_a_sibling() -> None:
    async def call_tool(call: ToolCall) -> ToolOutcome:
        if call.call.tool == "hangs":
            await asyncio.Event().wait()
        return ToolOutcome(call_id="rekeys", status="completed", token_hash="next")

    steps = ScriptedSteps(calls("rekeys", "hangs"))
    steps.call_tool = call_tool
    turn = asyncio.create_task(finished(steps))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    turn.cancel()

    assert (await turn).token_hash == "next"


async def test_the_token_that_a_conclusion_found_is_the_sessions() -> None:
    steps = ScriptedSteps(StepFailed(BROKEN))
    steps.conclusion = Concluded(token_hash="found", head=7)

    result = await finished(steps)

    assert (result.token_hash, result.head) == ("found", 7)


async def test_people_see_the_model_that_answered_last() -> None:
    steps = ScriptedSteps(calls("a").model_copy(update={"model": "newer"}), Finished(model="newest"))

    result = await finished(steps, REQUEST.model_copy(update={"model": "older"}))

    assert steps.labels == ["older", "newer"]
    assert result.model == "newest"


ANSWER = DeliveryRef(id="dlv_answer", kind="answer", token_hash="")
AWAITED_CALL = DeliveryRef(id="subagent-call:clerk:c0", kind=AWAITED, token_hash="")


async def test_a_cancelled_turn_that_waits_for_children_ends_after_them() -> None:
    steps = ScriptedSteps()
    steps.resumed = Resumed(
        calls=(ApprovedCall(at=Coordinates(session_id="ses_1", turn=0), call=CallRef(call_id="c1", tool="act")),)
    )
    steps.stopping = True

    result = await finished(steps, REQUEST.model_copy(update={"turn": 1, "deliveries": (ANSWER, AWAITED_CALL)}))

    assert (result.cancelled, steps.concluded) == (True, [])
    assert result.awaited is not None
    assert result.awaited.keys == (AWAITED_CALL.id,)
    again = TurnRequest.model_validate(result.awaited.request)
    assert again.deliveries == (ANSWER, AWAITED_CALL)
    # The store has no delivery for what the turn waits for.
    assert conclusion(again, 0, CANCELLED).deliveries == (ANSWER,)


async def test_a_turn_that_waits_for_children_first_keeps_what_it_has_not_read() -> None:
    message = DeliveryRef(id="dlv_9", token_hash="now")

    result = await finished(ScriptedSteps(), REQUEST.model_copy(update={"deliveries": (message, AWAITED_CALL)}))

    assert result.awaited is not None
    assert TurnRequest.model_validate(result.awaited.request).deliveries == (message,)
