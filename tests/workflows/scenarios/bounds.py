"""A session reaches a bound of time."""

import time

from perdure.protocol.deliveries import Bounds
from perdure.protocol.requests import ModelCall, ModelOutcome

from .stage import ASKED, Stage, Table, hangs

BOUNDS = Table()

_SOON = 2.0
_CLOSED = ("ask close_session", "close_session ends")


def _ends_soon() -> Bounds:
    return Bounds(deadline=time.time() + _SOON)


@BOUNDS.add({"": ("patch session-bounds", "timer", "timer fires", *_CLOSED)})
async def deadline_while_parked(stage: Stage) -> None:
    await stage.start(open=(ASKED,), turn=1, bounds=_ends_soon())


@BOUNDS.add({"": ("patch session-bounds", "turn begins", "timer fires", "stop turn", "turn ends", *_CLOSED)})
async def deadline_in_a_turn(stage: Stage) -> None:
    async def answer(call: ModelCall) -> ModelOutcome:
        await hangs()
        raise AssertionError

    stage.outside.answer = answer
    session = await stage.start(bounds=_ends_soon())
    await session.deliver("dlv_0")


@BOUNDS.add({"": ("patch session-bounds", "ask turn", "turn ends", "timer", "timer fires", *_CLOSED)})
async def idle(stage: Stage) -> None:
    """The time counts from the end of the last turn."""
    session = await stage.start(bounds=Bounds(idle_seconds=_SOON))
    await session.deliver("dlv_0")


@BOUNDS.add({"": ("patch session-bounds", "timer", "ask turn", "turn ends", "timer", "timer fires", *_CLOSED)})
async def idle_after_people_were_asked(stage: Stage) -> None:
    """An answer comes in time; nothing comes after it."""
    session = await stage.start(open=(ASKED,), turn=1, bounds=Bounds(idle_seconds=_SOON, attempts=0, turn_seconds=60))
    await session.parked()
    await session.deliver("ans_1", kind="answer")
