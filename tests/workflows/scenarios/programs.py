"""Turns whose model writes programs."""

from perdure.protocol.requests import ApprovedCall, CallRef, Coordinates, ProgramOutcome, Programs, Resumed

from .stage import ASKED, Stage, Table

PROGRAMS = Table()

_PROGRAM = CallRef(call_id="p", tool="code_mode")
_CALLS = tuple(CallRef(call_id=f"p:tool-{number}", tool="act", stage="code/p/0") for number in (1, 2))
_ENDED = ProgramOutcome(call_id="p", ended=True)

_ASKED = ("ask call_model", "call_model ends")
_STAGE = ("ask run_program", "run_program ends")


def _step() -> Programs:
    return Programs(calls=(), programs=(_PROGRAM,), parallel=4)


async def _program(stage: Stage) -> None:
    """A program makes two calls at once, then one that waits for people; another program makes none."""
    stage.script({(0, 0): _step(), (2, 0): _step()})
    session = await stage.start()
    at = Coordinates(session_id=session.handle.id, turn=0, step=0)
    again = ApprovedCall(at=at, call=_PROGRAM)
    asked = CallRef(call_id="p:tool-3", tool="act", stage="code/p/1")
    stage.outside.resumed = Resumed(
        kind="programs", calls=(ApprovedCall(at=at, call=asked),), programs=(again,), parallel=4
    )
    stage.outside.programs = [
        ProgramOutcome(call_id="p", calls=_CALLS, parallel=4),
        ProgramOutcome(call_id="p", open=(ASKED,)),
        _ENDED,
        _ENDED,
    ]
    await session.deliver("dlv_0")
    await session.parked()
    await session.deliver("ans_1", kind="answer")
    await session.deliver("dlv_1")


@PROGRAMS.add(
    {
        "turn-0": (
            *_ASKED,
            *("patch code-mode", *_STAGE, "ask call_tool", "ask call_tool", "call_tool ends", "call_tool ends"),
            *(*_STAGE, "ask park_programs", "park_programs ends", "ends"),
        ),
        "turn-1": ("ask resume_turn", "patch code-mode", "ask call_tool", "call_tool ends", *_STAGE, *_ASKED, "ends"),
        "turn-2": (*_ASKED, "patch code-mode", *_STAGE, *_ASKED, "ends"),
    }
)
async def programs(stage: Stage) -> None:
    await _program(stage)


@PROGRAMS.add({"": (*_ASKED, "patch code-mode", *_STAGE, "ask park_programs", "ask resume_turn", *_STAGE, *_ASKED)})
async def inline_programs(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await _program(stage)
