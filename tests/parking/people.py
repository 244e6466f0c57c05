"""What people do to a session in each of its states: a cell of the table each."""

from tests.support.chaos.people import answer, cancel, response, results, row_of, stopped
from tests.support.chaos.scripts import say
from tests.support.chaos.world import World
from tests.support.talk import text

from .cells import cell
from .checks import posted, reads_the_next, waits_for_its_turn, wire, withdrawn
from .states import cancelling, finished, half_answered, idle, log, on_approval, on_both, on_question, running, types

# --- a message ----------------------------------------------------------------------------------------------


@cell("idle", "a message")
async def an_idle_session_answers_a_message(world: World) -> None:
    case, script = await idle(world), say()
    assert await case.caller.say(script.message) == script.answer


@cell("running", "a message")
async def a_running_turn_lets_a_message_wait(world: World) -> None:
    case = await running(world)
    await waits_for_its_turn(case)


@cell("parked on approval", "a message")
async def a_message_waits_behind_an_approval_unless_it_names_an_option(world: World) -> None:
    """Behind the park, unless it names an option."""
    case, script = await on_approval(world), say()
    await case.caller.send(script.message)
    assert row_of(world, case.approval)["status"] == "open"
    await case.caller.send(" Approve ")
    assert text(await case.caller.until_boundary()) == case.answer
    assert text(await case.caller.until_boundary()) == script.answer
    assert case.effects("pay") == 1


@cell("parked on question", "a message")
async def a_message_waits_behind_a_question_unless_it_names_an_option(world: World) -> None:
    case, script = await on_question(world), say()
    await case.caller.send(script.message)
    assert row_of(world, case.question)["status"] == "open"
    await case.caller.send("2")
    assert text(await case.caller.until_boundary()) == case.answer
    assert text(await case.caller.until_boundary()) == script.answer
    assert row_of(world, case.question)["answer"]["optionId"] == "blue"


@cell("parked on both", "a message")
async def a_message_answers_neither_of_two_requests(world: World) -> None:
    """Of two requests none is meant, whatever it says."""
    case, script = await on_both(world), say()
    await case.caller.send("approve")
    await case.caller.send(script.message)
    await answer(case.caller, case.question, "red")
    await case.caller.until_boundary()
    assert case.effects("pay") == 0
    await answer(case.caller, case.approval)
    assert text(await case.caller.until_boundary()) == case.answer
    assert text(await case.caller.until_boundary()) == "ok"
    assert text(await case.caller.until_boundary()) == script.answer


@cell("cancelling", "a message")
async def a_message_waits_for_the_end_of_a_cancelled_turn(world: World) -> None:
    case, script = await cancelling(world), say()
    await case.caller.send(script.message)
    world.ledger.open(case.gate)
    events = await case.caller.until_boundary()
    assert events[-2]["type"] == "turn.cancelled"
    assert text(await case.caller.until_boundary()) == script.answer


@cell("finished", "a message")
async def a_finished_session_refuses_a_message(world: World) -> None:
    case = await finished(world)
    refused = await posted(case, message="hello")
    assert (refused.status_code, refused.json()["code"]) == (409, "session_not_active")


# --- an answer ----------------------------------------------------------------------------------------------


@cell("idle", "an answer")
async def a_closed_request_takes_the_same_answer_again_and_no_other(world: World) -> None:
    """To what is closed: the same one again is the same; another one authorises nothing, and the model learns of it."""
    case = await on_approval(world)
    first = await case.caller.send(inputResponses=[response(case.approval, "deny")])
    await case.caller.until_boundary()
    assert await case.caller.send(inputResponses=[response(case.approval, "deny")]) == first
    assert (await answer(case.caller, case.approval))["optionId"] == "deny"
    await case.caller.until_boundary()
    assert (case.effects("pay"), types(case).count("turn.started")) == (0, 3)


@cell("running", "an answer")
async def an_answer_to_a_running_turn_counts_at_once_and_resumes_the_next(world: World) -> None:
    """Counts at once, and is carried out in the next turn."""
    case = await half_answered(world)
    assert (await answer(case.caller, case.approval))["status"] == "answered"
    world.ledger.open(case.gate)
    await case.caller.until_boundary()
    assert text(await case.caller.until_boundary()) == case.answer
    assert len(results(wire(case))) == 2


@cell("parked on approval", "an answer")
async def an_approval_runs_its_call(world: World) -> None:
    case = await on_approval(world)
    assert (await answer(case.caller, case.approval))["status"] == "answered"
    assert text(await case.caller.until_boundary()) == case.answer
    assert case.effects("pay") == 1


@cell("parked on question", "an answer")
async def an_answer_resumes_the_turn_that_asked(world: World) -> None:
    case = await on_question(world)
    assert (await answer(case.caller, case.question, "red"))["optionId"] == "red"
    assert text(await case.caller.until_boundary()) == case.answer


@cell("parked on both", "an answer")
async def an_approval_runs_its_call_while_a_question_stays_open(world: World) -> None:
    """What was approved runs at once; the model is asked when nothing is open any more."""
    case = await on_both(world)
    await answer(case.caller, case.approval)
    events = await case.caller.until_boundary()
    assert (case.effects("pay"), text(events)) == (1, "")
    assert [event["type"] for event in events][-3:] == ["input.requested", "turn.completed", "session.waiting"]
    await answer(case.caller, case.question, "red")
    assert text(await case.caller.until_boundary()) == case.answer


@cell("cancelling", "an answer")
async def an_answer_to_a_cancelled_turn_runs_nothing(world: World) -> None:
    """It counts, but nothing is executed any more; the model learns of it in a turn of its own."""
    case = await cancelling(world)
    assert (await answer(case.caller, case.approval))["status"] == "answered"
    world.ledger.open(case.gate)
    assert (await case.caller.until_boundary())[-2]["type"] == "turn.cancelled"
    await case.caller.until_boundary()
    # The first one was at work already, and did not listen.
    assert results(wire(case)) == [("pay", "completed"), ("pay", "rejected")]
    assert types(case).count("turn.cancelled") == 1


@cell("finished", "an answer")
async def a_finished_session_refuses_an_answer(world: World) -> None:
    case, other = await finished(world), await on_approval(world)
    refused = await posted(case, inputResponses=[response(other.approval)])
    assert (refused.status_code, refused.json()["code"]) == (409, "session_not_active")
    assert row_of(world, other.approval)["status"] == "open"


# --- a cancel -----------------------------------------------------------------------------------------------


@cell("idle", "a cancel")
async def a_cancel_of_an_idle_session_does_nothing(world: World) -> None:
    case = await idle(world)
    before = len(log(case))
    assert await cancel(case.caller) == "no_active_turn"
    assert len(log(case)) == before


@cell("running", "a cancel")
async def a_cancel_ends_a_running_turn(world: World) -> None:
    case = await running(world)
    assert await cancel(case.caller) == "accepted"
    events = await case.caller.until_boundary()
    ends = ["action.result", "step.completed", "turn.cancelled", "session.waiting"]
    assert [event["type"] for event in events][-4:] == ends
    world.ledger.open(case.gate)
    await reads_the_next(case)
    assert case.effects("charge") == 0


@cell("parked on approval", "a cancel")
async def a_cancel_withdraws_an_approval(world: World) -> None:
    case = await on_approval(world)
    await withdrawn(case, case.approval)
    assert results(wire(case)) == [("pay", "rejected")]


@cell("parked on question", "a cancel")
async def a_cancel_withdraws_a_question(world: World) -> None:
    case = await on_question(world)
    await withdrawn(case, case.question)


@cell("parked on both", "a cancel")
async def a_cancel_withdraws_both_requests(world: World) -> None:
    case = await on_both(world)
    await withdrawn(case, case.approval, case.question)


@cell("cancelling", "a cancel")
async def a_second_cancel_changes_nothing(world: World) -> None:
    """Asking twice is asking once."""
    case = await cancelling(world)
    assert await cancel(case.caller) == "accepted"
    world.ledger.open(case.gate)
    await stopped(world, case.caller)
    assert types(case).count("cancel.requested") == 1
    await reads_the_next(case)


@cell("finished", "a cancel")
async def a_cancel_of_a_finished_session_does_nothing(world: World) -> None:
    case = await finished(world)
    assert await cancel(case.caller) == "no_active_turn"
    assert types(case)[-1] == "session.completed"
