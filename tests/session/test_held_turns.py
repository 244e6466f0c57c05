"""Turns that cannot continue, and what a conclusion reports of them."""

import pytest

from perdure.protocol.actions import Park
from perdure.protocol.requests import Concluded, Conclusion, Finished, Resumed, ResumeTurn, Snapshot, TurnRequest
from perdure.session.turn import StepFailed, run_turn

from .test_turn import ANSWERED, BROKEN, GONE, HELD_BY, REQUEST, ScriptedSteps, calls, finished


async def test_an_unreadable_snapshot_is_held_and_handed_back_untouched() -> None:
    strange = Snapshot(version=99, data={"from": "the future"})
    steps = ScriptedSteps()
    request = HELD_BY.model_copy(update={"snapshot": strange})

    result = await finished(steps, request)

    assert (result.action, result.snapshot, result.held) == (Park(), strange, request.model_dump(mode="json"))
    assert (result.failure and result.failure.code, steps.concluded) == ("UNREADABLE_STATE", [])


@pytest.mark.parametrize("holds", [True, False])
async def test_a_token_that_was_set_before_a_snapshot_could_not_be_read_is_kept(holds: bool) -> None:
    strange = Snapshot(version=99, data={"from": "the future"})
    set_before = {"snapshot": strange, "step": 3, "token_hash": "later", "retired": ("first",), "holds": holds}

    result = await finished(ScriptedSteps(), REQUEST.model_copy(update=set_before))

    assert (result.token_hash, result.retired) == ("later", ("first",))


async def test_an_older_driver_learns_that_a_snapshot_is_unreadable_and_keeps_it() -> None:
    strange = Snapshot(version=99, data={"from": "the future"})
    steps = ScriptedSteps()

    result = await finished(steps, REQUEST.model_copy(update={"snapshot": strange}))

    assert (result.action, result.snapshot, result.held) == (Park(), strange, None)
    assert steps.concluded[0].failure.code == "UNREADABLE_STATE"


async def test_a_turn_that_no_worker_can_serve_is_held_and_emits_nothing() -> None:
    steps = ScriptedSteps(calls("a"), StepFailed(GONE, held=True))

    result = await finished(steps, HELD_BY)

    assert (result.action, result.failure, steps.concluded) == (Park(), GONE, [])
    assert result.held is not None
    held = TurnRequest.model_validate(result.held)
    assert (held.step, held.turn, held.deliveries) == (1, 3, REQUEST.deliveries)


async def test_a_held_turn_continues_where_it_stopped() -> None:
    result = await finished(ScriptedSteps(calls("a"), StepFailed(GONE, held=True)), HELD_BY)
    assert result.held is not None
    steps = ScriptedSteps(Finished())

    await finished(steps, TurnRequest.model_validate(result.held))

    assert [call.at.step for call in steps.model_calls] == [1]


async def test_a_turn_that_was_held_before_people_were_looked_at_looks_at_them_again() -> None:
    async def resume(resumption: ResumeTurn) -> Resumed:
        raise StepFailed(GONE, held=True)

    steps = ScriptedSteps()
    steps.resume = resume

    result = await finished(steps, ANSWERED.model_copy(update={"holds": True}))

    assert result.held is not None
    held = TurnRequest.model_validate(result.held)
    assert (held.open, held.deliveries) == (ANSWERED.open, ANSWERED.deliveries)


async def test_an_older_driver_gets_a_failure_because_it_holds_nothing() -> None:
    steps = ScriptedSteps(StepFailed(GONE, held=True))

    result = await finished(steps)

    assert (result.held, result.failure, len(steps.concluded)) == (None, GONE, 1)


async def test_a_conclusion_that_no_worker_can_write_is_held_too() -> None:
    async def conclude(conclusion: Conclusion) -> Concluded:
        raise StepFailed(GONE, held=True)

    steps = ScriptedSteps(StepFailed(BROKEN))
    steps.conclude = conclude

    result = await finished(steps, HELD_BY)

    assert (result.held is not None, result.failure) == (True, GONE)


async def test_a_conclusion_that_failed_for_good_is_left_to_the_driver() -> None:
    """An older driver ignores what is held: then the turn would never be concluded."""

    async def conclude(conclusion: Conclusion) -> Concluded:
        raise StepFailed(BROKEN)

    steps = ScriptedSteps(StepFailed(BROKEN))
    steps.conclude = conclude

    with pytest.raises(StepFailed):
        await run_turn(HELD_BY, steps)


async def test_the_status_after_a_conclusion_decides_what_the_driver_does() -> None:
    steps = ScriptedSteps(StepFailed(BROKEN.model_copy(update={"structural": True})))
    steps.conclusion = Concluded(over=False)

    assert (await finished(steps)).action == Park()
