"""Turns in the history of their driver."""

from perdure.protocol import names
from perdure.protocol.requests import Calls, Finished, ModelCall, ModelOutcome, Parked

from . import cancels, parking, renewal, turns
from .stage import ASKED, Stage, Table, calls, hangs

INLINE = Table()

_ASKED = ("ask call_model", "call_model ends")
_TOOL = ("ask call_tool", "call_tool ends")


@INLINE.add(
    {
        "": (
            *("ask refuse_delivery", "refuse_delivery ends", "patch inline-turns", *_ASKED),
            *(*_ASKED, "ask call_tool", "ask call_tool", "call_tool ends", "call_tool ends", *_ASKED),
            *["ask call_model", "call_model fails", "ask conclude_turn", "conclude_turn ends"] * 2,
            "ends",
        )
    }
)
async def inline_session(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await turns.session(stage)


@INLINE.add({"": (*_ASKED, "ask call_tool", "ask call_tool", "call_tool ends", "ask call_tool", *_ASKED)})
async def inline_parallel_calls(stage: Stage) -> None:
    """Three calls, two at a time."""
    stage.bench.turns = "inline"
    stage.script({(0, 0): calls(3, parallel=2)})
    session = await stage.start()
    await session.deliver("dlv_0")


@INLINE.add({"": ("patch inline-turns", "patch parallel-calls", *["ask call_tool"] * 16, "call_tool ends", *_TOOL)})
async def inline_unlimited_calls(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await turns.unlimited_calls(stage)


@INLINE.add(
    {
        "": (
            *(*_ASKED, *_TOOL, "ask park_turn", "park_turn ends", "signal deliver", "signal deliver"),
            *("ask resume_turn", "resume_turn ends", *_TOOL, *_ASKED, *_ASKED),
        )
    }
)
async def inline_approved(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await parking.approved(stage)


@INLINE.add({"": (*_ASKED, "timer", "timer fires", "ask resume_turn", "resume_turn ends", *_ASKED)})
async def inline_expired(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await parking.expired(stage)


@INLINE.add({"": (*_ASKED, "signal cancel", "ask withdraw_inputs", "withdraw_inputs ends", *_ASKED)})
async def inline_withdrawn(stage: Stage) -> None:
    stage.bench.turns = "inline"
    stage.script({(0, 0): Parked(open=(ASKED,))})
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.parked()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.deliver("dlv_1")


@INLINE.add(
    {
        "": (
            *("ask call_model", "signal cancel", "stop call_model", "call_model is stopped"),
            *("ask conclude_turn", "signal cancel", "patch cancel-turn-once", "conclude_turn ends", *_ASKED),
        )
    }
)
async def inline_cancelled_twice(stage: Stage) -> None:
    """The second cancel arrives while the end of the turn is written."""

    async def answer(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 0:
            await hangs()
        return Finished()

    stage.bench.turns = "inline"
    stage.outside.answer = answer
    concluding = stage.hold(names.CONCLUDE_TURN)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("ask call_model")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await concluding.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("patch cancel-turn-once")
    await session.deliver("dlv_1")
    concluding.open()


@INLINE.add({"": ("ask call_tool", "ask call_tool", "signal cancel", "stop call_tool", "stop call_tool", *_ASKED)})
async def inline_cancel_while_tools_run(stage: Stage) -> None:
    async def act(_: object) -> None:
        await hangs()

    stage.bench.turns = "inline"
    stage.script({(0, 0): calls(2)})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("ask call_tool", "ask call_tool")
    await session.handle.signal(names.CANCEL, {})
    await session.deliver("dlv_1")


@INLINE.add(
    {"": ("ask call_model", "signal cancel", "call_model ends", "patch stop-before-calls", "ask conclude_turn")}
)
async def inline_cancel_before_calls(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await cancels.cancelled_before_calls(stage, "stop call_model", part="")


@INLINE.add({"": ("call_model fails", "ask conclude_turn", "patch conclude-to-the-end", "conclude_turn ends", *_ASKED)})
async def inline_cancel_while_a_turn_concludes(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await cancels.cancelled_while_a_turn_concludes(stage, part="")


@INLINE.add(
    {
        "": (*_ASKED, *_TOOL, "ask turn", "turn begins", "turn ends", "goes on in a new run"),
        "turn-0": ("begins", "ask call_model", "call_tool ends", "ends"),
    },
    brief=True,
)
async def inline_long_turn(stage: Stage) -> None:
    """The rest of a turn that outgrows its driver's history runs as a child workflow."""
    stage.bench.turns = "inline"
    await renewal.renewed_turn(stage)
    await stage.until("goes on in a new run")


@INLINE.add(
    {
        "": (
            *("ask turn", "turn ends", "signal deliver", "patch inline-turns", *_ASKED),
            *("signal deliver", "ask turn", "turn ends"),
        ),
        "turn-0": ("ends",),
        "turn-2": ("ends",),
    }
)
async def inline_in_between(stage: Stage) -> None:
    """Each turn says how the next one runs."""
    said = {0: "inline", 1: "child", 2: None}

    async def answer(call: ModelCall) -> ModelOutcome:
        return Finished(turns=said[call.at.turn])

    stage.outside.answer = answer
    session = await stage.start()
    for number in range(3):
        await session.deliver(f"dlv_{number}")
        await stage.until(*_ASKED if number == 1 else ["turn ends"] * (number // 2 + 1))
        await stage.settled()


@INLINE.add({"": ("signal repair", "stop call_model", "ask conclude_turn", "conclude_turn ends", "ask close_session")})
async def inline_turn_of_a_session_that_an_operator_ends(stage: Stage) -> None:
    async def answer(_: ModelCall) -> ModelOutcome:
        await hangs()
        return Calls(calls=())

    stage.bench.turns = "inline"
    stage.outside.answer = answer
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("ask call_model")
    await session.handle.signal(names.REPAIR, {"how": "fail"})
