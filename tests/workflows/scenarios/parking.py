"""People are asked, and answer, or do not."""

import time

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import ApprovedCall, CallRef, Coordinates, Failure, Parked, Resumed

from .stage import ASKED, Stage, Table, Unstoppable, calls

PARKING = Table()

_OTHER = OpenInput(request_id="inp_2")


def _soon(expires: float, *remind: float) -> Parked:
    now = time.time()
    return Parked(
        open=(OpenInput(request_id="inp_1", expires_at=now + expires, remind_at=tuple(now + each for each in remind)),)
    )


def _approved(call_id: str, session_id: str, turn: int = 0) -> ApprovedCall:
    return ApprovedCall(at=Coordinates(session_id=session_id, turn=turn), call=CallRef(call_id=call_id, tool="act"))


@PARKING.add(
    {
        "": ("signal cancel", "patch spare-what-is-parked", "signal deliver", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ask call_model", "ends"),
    }
)
async def parked(stage: Stage) -> None:
    """The turn that will read the answer is cancelled before the driver knows of that answer."""
    stage.script({(0, 0): Parked(open=(ASKED,))})
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.parked()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await stage.until("patch spare-what-is-parked")
    await session.deliver("dlv_1", kind="answer")


@PARKING.add(
    {
        "": ("turn ends", "signal deliver", "signal deliver", "ask turn", "turn ends", "ask turn", "turn ends"),
        "turn-0": ("ask call_model", "ask call_tool", "call_tool ends", "ask park_turn", "park_turn ends", "ends"),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ask call_tool", "call_tool ends", "ask call_model", "ends"),
    }
)
async def approved(stage: Stage) -> None:
    """Some calls of a step run and one waits for people; their answer is read before a message that came earlier."""
    stage.script({(0, 0): calls(2, open=(ASKED,), head=5)})
    session = await stage.start()
    stage.outside.resumed = Resumed(calls=(_approved("asked", session.handle.id),), parallel=4)
    await session.deliver("dlv_0")
    await session.parked()
    await session.deliver("dlv_1")
    await session.deliver("ans_1", kind="answer")


@PARKING.add(
    {
        "": ("turn ends", "signal deliver", "ask turn", "turn ends", "signal deliver", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ask call_tool", "ask call_tool", "ask park_turn", "ends"),
        "turn-2": ("ask resume_turn", "resume_turn ends", "ends"),
    }
)
async def answered_in_parts(stage: Stage) -> None:
    """Two requests: the first answer leaves one open, the second one ends the turn with a failure."""
    stage.script({(0, 0): Parked(open=(ASKED, _OTHER))})
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.parked()
    some = (_approved("a", session.handle.id), _approved("b", session.handle.id))
    stage.outside.resumed = Resumed(calls=some, parallel=1, open=(_OTHER,))
    await session.deliver("ans_1", kind="answer")
    await stage.until(*["turn ends"] * 2)
    stage.outside.resumed = Resumed(failure=Failure(code="DENIED", message="Nobody wants it."))
    await session.deliver("ans_2", kind="answer")


@PARKING.add(
    {
        "": ("turn ends", "signal deliver", "ask turn", "turn ends", "signal deliver", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "ask park_turn", "ends"),
    }
)
async def answered_again(stage: Stage) -> None:
    """An answer that an earlier turn has consumed already: this turn emits nothing."""
    stage.script({(0, 0): Parked(open=(ASKED,))})
    session = await stage.start()
    stage.outside.resumed = Resumed(open=(ASKED,), silent=True)
    await session.deliver("dlv_0")
    await session.parked()
    await session.deliver("ans_1", kind="answer")
    await stage.until(*["turn ends"] * 2)
    stage.outside.resumed = Resumed()
    await session.deliver("ans_2", kind="answer")


@PARKING.add(
    {
        "": ("turn ends", "timer", "signal deliver", "timer is cancelled", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ask call_model", "call_model ends", "ends"),
    }
)
async def question(stage: Stage) -> None:
    """A question is answered in time: the answer goes to the model, and no call has to run."""
    stage.script({(0, 0): _soon(3600.0)})
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.parked()
    await stage.until("timer")
    await session.deliver("ans_1", kind="answer")


@PARKING.add(
    {
        "": ("turn ends", "timer", "timer fires", "ask turn", "turn ends"),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ask call_model", "call_model ends", "ends"),
    }
)
async def expired(stage: Stage) -> None:
    stage.script({(0, 0): _soon(2.0)})
    session = await stage.start()
    await session.deliver("dlv_0")


@PARKING.add(
    {
        "": (
            *("turn ends", "timer", "timer fires", "ask remind", "remind ends"),
            *("timer", "timer fires", "ask remind", "remind ends"),
            *("timer", "signal deliver", "timer is cancelled", "ask turn", "turn ends"),
        )
    }
)
async def reminded(stage: Stage) -> None:
    stage.script({(0, 0): _soon(3600.0, 1.5, 3.0)})
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("remind ends", "remind ends", "timer")
    await session.deliver("ans_1", kind="answer")


_STALE = DeliveryRef(id="dlv_old", token_hash="old")
_DUE = tuple(OpenInput(request_id=f"inp_{number}", remind_at=(1.0,)) for number in (1, 2))


@PARKING.add({"": ("ask refuse_delivery", *["ask remind", "remind ends"] * 2, "ask turn", "turn ends")})
async def much_at_once(stage: Stage) -> None:
    """What is refused comes before reminders, and these before the turn that has been asked for."""
    answer = DeliveryRef(id="ans_1", kind="answer", token_hash="now")
    await stage.start(open=_DUE, turn=1, inbox=(answer, _STALE))


@PARKING.add({"": ("ask withdraw_inputs", "withdraw_inputs ends", "ask refuse_delivery", "ask turn", "turn ends")})
async def much_at_once_and_a_cancel(stage: Stage) -> None:
    """The withdrawal comes first; then there is no request left to remind of."""
    message = DeliveryRef(id="dlv_1", token_hash="now")
    await stage.start(open=_DUE, turn=1, cancel="this", inbox=(_STALE, message))


@PARKING.add({"": ("turn ends", "timer", "signal cancel", "ask withdraw_inputs", "ask turn", "turn ends")})
async def withdrawn(stage: Stage) -> None:
    """The parked turn is cancelled, and the next message is read."""
    stage.script({(0, 0): _soon(3600.0)})
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("timer")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("withdraw_inputs ends")
    await session.deliver("dlv_1")


@PARKING.add({"": ("turn ends", "signal cancel", "ask withdraw_inputs", "withdraw_inputs ends", "ends")})
async def withdrawn_task(stage: Stage) -> None:
    """A task that is cancelled while it is parked has no next message."""
    stage.script({(0, 0): Parked(open=(ASKED,))})
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")
    await session.parked()
    await session.handle.signal(names.CANCEL, {})


@PARKING.add(
    {
        "": ("ask turn", "turn ends", "ask withdraw_inputs", "withdraw_inputs ends"),
        "turn-0": ("is to stop", "call_model ends", "ends"),
    }
)
async def cancelled_while_parking(stage: Stage) -> None:
    """The turn parks although it was cancelled: what it has asked is withdrawn."""
    stage.outside.answer = said = Unstoppable(Parked(open=(ASKED,)))
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("is to stop", part="turn-0")
    said.gate.open()
