"""What people decided is carried out: once, and nothing that they did not decide."""

from typing import Any

import pytest

from perdure import Agent, AgentRegistry, Principal, ToolContext, tool
from perdure.errors import AgentGone, Superseded, UnreadableState
from perdure.harness.resume import TurnResumer
from perdure.protocol.inputs import InputAnswer, digest
from perdure.protocol.requests import CloseSession, Coordinates, Finished, Resumed, ResumeTurn
from perdure.session import inputs
from perdure.session.inputs import CONTINUED
from perdure.session.state import OPERATOR_FAILED
from perdure.store.values import Attempt
from perdure.testing import ScriptedModel, call
from tests.support.lab import NO, SESSION, YES, lab

from .till import Till, asked, last_parts


async def test_a_worker_without_the_agent_carries_out_nothing() -> None:
    """What is approved for the session, and how many calls may run at a time, only the agent says."""
    till = Till()
    async with asked(till, 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        resuming = TurnResumer(it.store, AgentRegistry([Agent("another")]))
        at = Coordinates(session_id=SESSION, turn=1)
        resumption = ResumeTurn(at=at, agent="tester", deliveries=(answer,), open=tuple(open))

        with pytest.raises(AgentGone):
            await resuming.resume(resumption, Attempt(1, 1))

        assert (await it.resume(answer, open=open)).calls


async def test_an_approved_call_runs_in_the_next_turn_and_its_result_is_emitted_there() -> None:
    till = Till()
    async with asked(till, 5) as (it, model, open):
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        assert (till.paid, resumed.open) == ([], ())

        await it.run_approved(resumed.calls[0])
        assert isinstance(await it.model(answer, turn=1), Finished)

        assert till.paid == [5]
        events = await it.events()
        first = next(event.index for event in events if event.type == "session.waiting")
        assert [event.type for event in events][first + 1 :] == [
            "input.resolved",
            "turn.started",
            "action.result",
            "step.started",
            "message.appended",
            "message.completed",
            "step.completed",
            "turn.completed",
            "session.waiting",
        ]
        (result,) = await it.emitted("action.result")
        assert (result["turnId"], result["status"], result["result"]["output"]) == ("turn_1", "completed", "paid 5")
        assert last_parts(model) == ["paid 5"]
        assert len(model.prompts[-1].messages) == 3
        record = await it.store.record(SESSION, 0, 0, "call/call_0_0")
        assert record is not None, "the outcome is recorded with the step that asked"


async def test_resuming_twice_is_resuming_once() -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        first = await it.resume(answer, open=open)
        before = await it.events()

        assert await it.resume(answer, open=open, generation=2) == first

        assert await it.events() == before


async def test_an_approved_call_whose_worker_died_keeps_to_its_effect_class() -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        resumed = await it.resume(await it.answer((open[0], YES)), open=open)
        first = await it.run_approved(resumed.calls[0])

        assert await it.run_approved(resumed.calls[0], generation=2) == first

        assert till.paid == [5]
        assert len(await it.emitted("action.result")) == 1


async def test_a_denied_call_is_reported_to_readers_and_to_the_model() -> None:
    till = Till()
    async with asked(till, 5) as (it, model, open):
        no = NO.model_copy(update={"reason": "too dear"})
        answer = await it.answer((open[0], no))

        assert await it.resume(answer, open=open) == Resumed()
        await it.model(answer, turn=1)

        assert till.paid == []
        (emitted,) = await it.emitted("action.result")
        error = {"code": "TOOL_EXECUTION_DENIED", "message": "Tool execution was denied. Reason: too dear"}
        assert (emitted["status"], emitted["error"], emitted["result"]["output"]) == ("rejected", error, error)
        assert last_parts(model) == [error]
        row = await it.store.session(SESSION)
        assert row is not None
        assert row.tool_calls == 1


async def test_a_denial_without_a_reason_reads_as_the_contract_says() -> None:
    async with asked(Till(), 5) as (it, _, open):
        await it.resume(await it.answer((open[0], NO)), open=open)

        (emitted,) = await it.emitted("action.result")
        assert emitted["error"] == {"code": "TOOL_EXECUTION_DENIED", "message": "Tool execution was denied."}


async def test_another_message_ignores_the_question() -> None:
    continued = InputAnswer(option_id="deny", reason=CONTINUED, principal_id="ada")
    model = ScriptedModel([[call("pay", amount=5), call("ask_question", prompt="Why?")], "Well."])
    async with lab(model, Till().tool(), can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay"))
        silent = continued.model_copy(update={"option_id": None})
        answer = await it.answer((open[0], continued), (open[1], silent), message="Later")
        await it.resume(answer, open=open)
        await it.model(answer, turn=1)

        error = {"code": "TOOL_EXECUTION_DENIED", "message": "Ignored because the user continued without responding."}
        assert last_parts(model) == [error, {"status": "ignored"}, "Later"]


async def test_changed_arguments_are_what_runs() -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        changed: dict[str, Any] = {"amount": 3}
        answer = YES.model_copy(update={"arguments": changed, "digest": digest(changed)})
        resumed = await it.resume(await it.answer((open[0], answer)), open=open)

        await it.run_approved(resumed.calls[0])

        assert till.paid == [3]


@pytest.mark.parametrize("wrong", [None, digest({"amount": 5})])
async def test_arguments_that_were_not_approved_are_not_run(wrong: str | None) -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        answer = YES.model_copy(update={"arguments": {"amount": 5000}, "digest": wrong})

        assert (await it.resume(await it.answer((open[0], answer)), open=open)).calls == ()

        (emitted,) = await it.emitted("action.result")
        assert (emitted["status"], emitted["error"]["code"]) == ("rejected", "TOOL_APPROVAL_MISMATCH")
        assert till.paid == []


async def test_a_forged_call_that_was_not_approved_does_not_run() -> None:
    till = Till()
    async with asked(till, 5, 6) as (it, _, open):
        resumed = await it.resume(await it.answer((open[0], YES)), open=open)
        forged = resumed.calls[0].model_copy(
            update={"call": resumed.calls[0].call.model_copy(update={"call_id": "call_0_1"})}
        )

        outcome = await it.run_approved(forged)

        assert (outcome.status, till.paid) == ("rejected", [])


async def test_answers_that_come_one_by_one_are_carried_out_one_by_one() -> None:
    till = Till()
    async with asked(till, 5, 6) as (it, model, open):
        first = await it.answer((open[1], YES))
        resumed = await it.resume(first, open=open)
        assert [each.request_id for each in resumed.open] == [open[0].request_id]
        await it.run_approved(resumed.calls[0])
        await it.park(resumed.open, turn=1)
        assert (await it.types())[-2:] == ["turn.completed", "session.waiting"]
        again = (await it.emitted("input.requested"))[-1]
        assert [each["requestId"] for each in again["requests"]] == [open[0].request_id]
        # Where a client finds what it shows of the request already.
        assert (again["turnId"], again["sequence"], again["stepIndex"]) == ("turn_0", 0, 0)

        second = await it.answer((open[0], NO))
        assert (await it.resume(second, open=resumed.open, turn=2)).calls == ()
        await it.model(second, turn=2)

        assert till.paid == [6]
        assert last_parts(model)[1] == "paid 6"
        assert last_parts(model)[0]["code"] == "TOOL_EXECUTION_DENIED"


async def test_requests_of_several_places_are_emitted_again_with_their_own_coordinates() -> None:
    async with asked(Till(), 5, 6, 7) as (it, _, open):
        resumed = await it.resume(await it.answer((open[0], YES)), open=open)
        await it.run_approved(resumed.calls[0])
        # One of an older build, of which nobody knows where it was shown first.
        unknown, known = resumed.open[0].model_copy(update={"first_shown": None}), resumed.open[1]

        await it.park((unknown, known), turn=1)

        again = [event for event in await it.events() if event.type == "input.requested"][1:]
        found = [(each.turn, each.data["turnId"], each.data["requests"][0]["requestId"]) for each in again if each.data]
        assert found == [(1, "turn_1", unknown.request_id), (1, "turn_0", known.request_id)]
        assert (await it.types())[-4:] == ["input.requested", "input.requested", "turn.completed", "session.waiting"]


async def test_two_answers_that_are_there_at_once_are_one_turn() -> None:
    till = Till()
    async with asked(till, 5, 6) as (it, _, open):
        first, second = await it.answer((open[0], YES)), await it.answer((open[1], YES))

        resumed = await it.resume(first, open=open)
        assert (len(resumed.calls), resumed.open) == (2, ())
        for approved in resumed.calls:
            await it.run_approved(approved)
        await it.model(first, turn=1)
        before = await it.events()

        assert await it.resume(second, turn=2) == Resumed(silent=True)
        assert (await it.model(second, turn=2)).kind == "unheard"
        assert await it.events() == before


async def test_a_turn_whose_answers_were_all_consumed_parks_without_an_event() -> None:
    till = Till()
    async with asked(till, 5, 6, 7) as (it, _, open):
        first, second = await it.answer((open[0], YES)), await it.answer((open[1], YES))
        resumed = await it.resume(first, open=open)
        await it.park(resumed.open, turn=1)
        before = await it.events()

        again = await it.resume(second, open=resumed.open, turn=2)
        await it.park(again.open, turn=2)

        assert again == Resumed(open=resumed.open, silent=True)
        assert await it.events() == before


async def test_a_message_that_comes_with_an_answer_follows_it() -> None:
    till = Till()
    async with asked(till, 5) as (it, model, open):
        answer = await it.answer((open[0], YES), message="And hurry")
        resumed = await it.resume(answer, open=open)
        await it.run_approved(resumed.calls[0])
        await it.model(answer, turn=1)

        assert last_parts(model) == ["paid 5", "And hurry"]
        types = await it.types()
        assert types[types.index("action.result") - 1] == "message.received"


async def test_a_late_answer_authorises_nothing_and_is_reported_to_the_model() -> None:
    till = Till()
    async with asked(till, 5, then=("Done.", "I see.")) as (it, model, open):
        answer = await it.answer((open[0], NO))
        await it.resume(answer, open=open)
        await it.model(answer, turn=1)

        late = await it.answer((open[0], YES))
        assert await it.resume(late, turn=2) == Resumed()
        await it.model(late, turn=2)

        assert till.paid == []
        (note,) = last_parts(model)
        assert note.startswith("<note ")
        assert "An answer about the call of pay arrived after that request was closed. It changed nothing." in note
        assert (await it.types())[-2:] == ["turn.completed", "session.waiting"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (InputAnswer(option_id="red"), {"optionId": "red", "status": "answered"}),
        (InputAnswer(text="blue"), {"text": "blue", "status": "answered"}),
    ],
)
async def test_the_answer_to_a_question_is_the_result_of_its_call(answer: InputAnswer, expected: Any) -> None:
    question = call("ask_question", prompt="Which?", options=["red", {"id": "g", "label": "Green"}], allowFreeform=True)
    model = ScriptedModel([question, "Nice."])
    async with lab(model, can_ask=True) as it:
        open = await it.parked(await it.deliver("Go"))
        (emitted,) = await it.emitted("input.requested")
        request = emitted["requests"][0]
        assert (request["display"], request["allowFreeform"]) == ("select", True)
        assert emitted["details"][request["requestId"]]["kind"] == "question"
        assert request["options"] == [{"id": "red", "label": "red"}, {"id": "g", "label": "Green"}]

        delivery = await it.answer((open[0], answer))
        assert await it.resume(delivery, open=open) == Resumed()
        await it.model(delivery, turn=1)

        assert last_parts(model) == [expected]
        assert "action.result" not in await it.types()
        assert "actions.requested" not in await it.types()


async def test_the_approver_does_not_become_the_principal_of_the_turn() -> None:
    seen: list[str] = []

    @tool(approval="always")
    def act(ctx: ToolContext) -> None:
        seen.append(ctx.session.auth.principal_id)

    ada = Principal(principal_id="ada", principal_type="user", authenticator="test")
    async with lab([call("act"), call("act")], act, can_ask=True) as it:
        open = await it.parked(await it.deliver("Go", principal=ada))
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        await it.run_approved(resumed.calls[0])
        open = await it.parked(answer, turn=1)
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open, turn=2)
        await it.run_approved(resumed.calls[0], turn=2)

        assert seen == ["ada", "ada"]


async def test_an_attempt_that_wakes_after_the_end_of_its_session_changes_nothing() -> None:
    async with asked(Till(), 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        await it.harness.close_session(CloseSession(session_id=SESSION, failure=OPERATOR_FAILED))

        with pytest.raises(Superseded):
            await it.resume(answer, open=open)

        assert (await it.types())[-1] == "session.failed"
        assert await it.session_status() == "failed"


async def test_a_turn_that_is_concluded_after_the_end_of_its_session_changes_nothing() -> None:
    async with asked(Till(), 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        await it.harness.close_session(CloseSession(session_id=SESSION, failure=OPERATOR_FAILED))

        await it.cancel(answer, turn=1)

        assert (await it.types())[-1] == "session.failed"


async def test_an_answer_to_an_unknown_request_changes_nothing() -> None:
    async with asked(Till(), 5, then=("I see.",)) as (it, model, open):
        await it.withdraw(open)
        stray = await it.deliver(None, kind="answer", answers=("inp_of_another_session",))

        assert await it.resume(stray) == Resumed()
        await it.model(stray, turn=1)

        assert last_parts(model)[-1].startswith("<note ")
        assert "An answer arrived for a request that this session never made." in last_parts(model)[-1]


@pytest.mark.parametrize("shape", ["request", "answer"])
async def test_what_people_were_asked_or_said_in_a_newer_version_is_left_to_a_newer_build(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    till = Till()
    async with asked(till, 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        # To a build that knows no version, this one is newer.
        monkeypatch.setattr(getattr(inputs, shape.upper()), "first", 0)

        with pytest.raises(UnreadableState, match="is of a newer version"):
            await it.resume(answer, open=open, turn=2)
        with pytest.raises(UnreadableState, match="is of a newer version"):
            await it.run_approved(resumed.calls[0])

        assert till.paid == []
