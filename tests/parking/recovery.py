"""What a session does after its worker died, or after a newer build was deployed: a cell of the table each."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tests.support.chaos.people import answer, results, stopped
from tests.support.talk import text

from .checks import posted, reads_the_next, wire
from .states import Case, types

Check: TypeAlias = Callable[[Case], Awaitable[None]]


async def idle(case: Case) -> None:
    await reads_the_next(case)


async def running_without_its_worker(case: Case) -> None:
    """It cannot be known whether a tool that may act once has acted."""
    case.world.ledger.open(case.gate)
    assert text(await case.caller.until_boundary()) == case.answer
    assert results(wire(case)) == [("charge", "failed")]
    assert case.effects("charge") <= 1
    await reads_the_next(case)


async def running_on_its_build(case: Case) -> None:
    case.world.ledger.open(case.gate)
    assert text(await case.caller.until_boundary()) == case.answer
    assert (results(wire(case)), case.effects("charge")) == ([("charge", "completed")], 1)
    await reads_the_next(case)


async def on_approval(case: Case) -> None:
    await answer(case.caller, case.approval)
    assert text(await case.caller.until_boundary()) == case.answer
    assert case.effects("pay") == 1


async def on_question(case: Case) -> None:
    await answer(case.caller, case.question, "red")
    assert text(await case.caller.until_boundary()) == case.answer


async def on_both(case: Case) -> None:
    await answer(case.caller, case.question, "red")
    await case.caller.until_boundary()
    await on_approval(case)


async def cancelling(case: Case) -> None:
    """The cancel request is honoured by the next worker."""
    case.world.ledger.open(case.gate)
    await stopped(case.world, case.caller)
    assert types(case).count("turn.cancelled") == 1
    await reads_the_next(case)


async def waiting_for_others(case: Case) -> None:
    """They are not started again; what one of them was at may have happened or not."""
    case.world.ledger.open(case.gate)
    assert text(await case.caller.until_boundary()) == case.answer
    kept = types(case)
    assert (kept.count("subagent.called"), kept.count("action.result")) == (1, 1)
    assert case.effects("charge") <= 1
    await reads_the_next(case)


async def finished(case: Case) -> None:
    case.caller.cursor = 0
    assert text(await case.caller.until_boundary()) == case.answer
    assert (await posted(case, message="hello")).status_code == 409


_ALIKE: dict[str, Check] = {
    "idle": idle,
    "parked on approval": on_approval,
    "parked on question": on_question,
    "parked on both": on_both,
    "cancelling": cancelling,
    "finished": finished,
    "waiting for children": waiting_for_others,
    "waiting for a remote": waiting_for_others,
    "waiting for code": waiting_for_others,
}
AFTER_A_CRASH: dict[str, Check] = {**_ALIKE, "running": running_without_its_worker}
AFTER_A_DEPLOY: dict[str, Check] = {**_ALIKE, "running": running_on_its_build}
