"""What people and time do to a session whose turn waits for others: three rows of the table."""

from tests.support.chaos.people import answer, cancel, row_of
from tests.support.chaos.world import World
from tests.support.talk import text
from tests.support.waiting import until

from .cells import cell
from .checks import expires, reads_the_next, waits_for_its_turn
from .states import Case, Others, handed, types

_OTHERS: tuple[Others, ...] = ("children", "a remote", "code")


def fill(others: Others) -> None:
    state = f"waiting for {others}"

    @cell(state, "a message")
    async def a_message_waits_for_the_turn(world: World) -> None:
        await waits_for_its_turn(await handed(world, others))

    @cell(state, "an answer")
    async def an_answer_counts_at_once(world: World) -> None:
        """What it allows runs while the others are at work; the turn that it begins waits for them."""
        case = await handed(world, others, "pay")
        assert (await answer(case.caller, case.approval))["status"] == "answered"
        await until(lambda: case.effects("pay") == 1, "the approved call")
        await _goes_on(case)

    @cell(state, "a cancel")
    async def a_cancel_stops_the_others(world: World) -> None:
        case = await handed(world, others)
        assert await cancel(case.caller) == "accepted"
        await case.caller.until_boundary()
        assert types(case)[-2:] == ["turn.cancelled", "session.waiting"]
        world.ledger.open(case.gate)
        await reads_the_next(case)
        assert case.effects("charge") == 0

    @cell(state, "an expiry")
    async def an_expiry_has_its_consequence_at_once(world: World) -> None:
        case = await handed(world, others, "pay_anyway")
        await expires(case)
        await until(lambda: case.effects("pay_anyway") == 1, "the call that nobody objected to")
        assert row_of(world, case.approval)["status"] == "expired"
        await _goes_on(case)


async def _goes_on(case: Case) -> None:
    case.world.ledger.open(case.gate)
    assert text(await case.caller.until_boundary()) == case.answer
    assert case.effects("charge") == 1


for each in _OTHERS:
    fill(each)
