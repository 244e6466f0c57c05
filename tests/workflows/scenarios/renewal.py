"""A run becomes long, and continues as new."""

from perdure.protocol import names
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome

from .stage import ASKED, Stage, Table, calls

RENEWAL = Table()

_TURN = ("ask turn", "turn begins", "turn ends")


@RENEWAL.add({"": (*_TURN, "goes on in a new run"), "run-1": ("begins", *_TURN)}, brief=True)
async def renewed(stage: Stage) -> None:
    """After a turn, as soon as Temporal suggests it; what waits is taken along."""
    session = await stage.start()
    for number in range(6):
        await session.deliver(f"dlv_{number}", coalesce=number > 4)
    await stage.until(*_TURN, part="run-1")


@RENEWAL.add(
    {
        "": ("signal deliver", "patch renew-when-parked", "goes on in a new run"),
        "run-1": ("begins", "signal deliver", "ask turn", "turn ends", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "ends"),
    },
    brief=True,
)
async def renewed_while_parked(stage: Stage) -> None:
    session = await stage.start(open=(ASKED,), turn=1)
    await session.parked()
    sent = 0
    while "run-1" not in await stage.histories():
        await session.deliver(f"dlv_{sent}", coalesce=True)
        sent += 1
    await session.deliver("ans_1", kind="answer")


@RENEWAL.add({"": ("signal deliver", "patch shorter-runs", "goes on in a new run"), "run-1": ("begins", *_TURN)})
async def renewed_after_some_turns(stage: Stage) -> None:
    """Temporal suggests nothing yet: two hundred events are enough."""
    session = await stage.start()
    for number in range(20):
        await session.deliver(f"dlv_{number}")
    await stage.until(*_TURN, part="run-1")


@RENEWAL.add(
    {"": ("patch shorter-runs", "patch turns-before-renewal", *_TURN, "timer", "timer fires", "goes on in a new run")}
)
async def renewed_when_nothing_waits(stage: Stage) -> None:
    session = await stage.start()
    for number in range(20):
        await session.deliver(f"dlv_{number}")
    await stage.until("goes on in a new run")


@RENEWAL.add({"": ("signal deliver", "patch renew-when-parked", "goes on in a new run"), "run-1": ("begins", *_TURN)})
async def renewed_by_length(stage: Stage) -> None:
    """The same without a turn. Runs of builds before waited for four hundred events."""
    session = await stage.start(attended=False, open=(ASKED,), turn=1)
    for _ in range(400):
        await session.handle.signal(names.DELIVER)
    await stage.work()
    await stage.until("goes on in a new run")
    await session.deliver("ans_1", kind="answer")


@RENEWAL.add(
    {
        "": _TURN,
        "turn-0": ("call_tool ends", "goes on in a new run"),
        "turn-0-run-1": ("ends",),
    },
    brief=True,
)
async def renewed_turn(stage: Stage) -> None:
    """A long turn is cut between two steps; its driver waits for the chain as for one run."""

    async def answer(call: ModelCall) -> ModelOutcome:
        return calls(2, parallel=2, head=call.at.step) if call.at.step < 3 else Finished()

    stage.outside.answer = answer
    session = await stage.start()
    await session.deliver("dlv_0")
