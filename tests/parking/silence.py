"""What silence does to a session in each of its states: a cell of the table each."""

import asyncio

from tests.support.chaos.people import answer, cancel, response, results, row_of, stopped
from tests.support.chaos.world import World, unique
from tests.support.talk import text

from .cells import cell
from .checks import expires, posted, reads_the_next, wire
from .states import half_answered, on_approval, on_both, on_question


@cell("idle", "an expiry")
async def an_answered_request_does_not_expire(world: World) -> None:
    """What was answered in time does not expire."""
    case = await on_approval(world, "pay_soon")
    await answer(case.caller, case.approval)
    await case.caller.until_boundary()
    await expires(case)
    await reads_the_next(case)
    assert (row_of(world, case.approval)["status"], case.effects("pay_soon")) == ("answered", 1)


@cell("running", "an expiry")
async def an_expiry_in_a_running_turn_is_settled_in_the_next(world: World) -> None:
    """It takes no answer any more; what was declared follows in a turn of its own, after this one."""
    case = await half_answered(world, "pay_soon")
    await expires(case)
    late = await posted(case, inputResponses=[response(case.approval)])
    assert (late.status_code, late.json()["code"]) == (409, "input_expired")
    assert row_of(world, case.approval)["status"] == "open"
    world.ledger.open(case.gate)
    await case.caller.until_boundary()
    assert text(await case.caller.until_boundary()) == case.answer
    assert row_of(world, case.approval)["status"] == "expired"
    assert sorted(results(wire(case))) == [("pay", "completed"), ("pay_soon", "rejected")]


@cell("parked on approval", "an expiry")
async def an_expired_approval_is_decided_as_declared(world: World) -> None:
    denied, agreed = await asyncio.gather(on_approval(world, "pay_soon"), on_approval(world, "pay_anyway"))
    assert text(await denied.caller.until_boundary()) == denied.answer
    assert text(await agreed.caller.until_boundary()) == agreed.answer
    assert (denied.effects("pay_soon"), agreed.effects("pay_anyway")) == (0, 1)


@cell("parked on question", "an expiry")
async def a_question_does_not_expire(world: World) -> None:
    case = await on_question(world)
    assert row_of(world, case.question)["request"]["expiresAt"] is None


@cell("parked on both", "an expiry")
async def an_expired_approval_leaves_the_question_open(world: World) -> None:
    """The approval is denied; the question still waits, and the model with it."""
    case = await on_both(world, "pay_soon")
    assert text(await case.caller.until_boundary()) == ""
    assert [row_of(world, each)["status"] for each in (case.approval, case.question)] == ["expired", "open"]
    await answer(case.caller, case.question, "red")
    assert text(await case.caller.until_boundary()) == case.answer
    assert case.effects("pay_soon") == 0


@cell("cancelling", "an expiry")
async def an_expired_request_of_a_cancelled_turn_is_withdrawn(world: World) -> None:
    """It is not needed any more: it is withdrawn."""
    case = await half_answered(world, "pay_anyway", cling=True)
    await cancel(case.caller)
    await expires(case)
    world.ledger.open(case.gate)
    await stopped(world, case.caller)
    await reads_the_next(case)
    assert row_of(world, case.approval)["status"] == "withdrawn"


@cell("finished", "an expiry")
async def a_finished_session_has_nothing_to_expire(world: World) -> None:
    """There is nothing to expire: a task opens no request, and what would have to be approved is rejected at once."""
    task, note, word = world.caller(), unique("n"), unique()
    await task.create(f'call pay_soon {{"note": "{note}"}} then say {word}', mode="task")
    events = await task.until_boundary()
    assert (results(events), text(events), events[-1]["type"]) == (
        [("pay_soon", "rejected")],
        word,
        "session.completed",
    )
    assert task.session_id not in world.store().inputs
