"""Turns that hand work to other sessions, and what these report."""

from temporalio.exceptions import ApplicationError

from perdure.protocol.deliveries import CHILD_ANSWER, CHILD_INPUT, CHILD_RESULT, CLEAR
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import CallRef, Delegated, ShownInputs
from tests.support.workflows import Driven

from .stage import Stage, Table, hangs

CHILDREN = Table()

_KEYS = ("subagent-call:clerk:c0", "subagent-call:clerk:c1")
_DELEGATED = Delegated(calls=(CallRef(call_id="c2", tool="act"),), keys=_KEYS)
_ASKED = ShownInputs(open=(OpenInput(request_id="inp_1"),))
_TURN = ("ask turn", "turn ends")
_STARTED = (*_TURN, "ask dispatch_children", "dispatch_children ends")
_COLLECTED = ("signal deliver", "signal deliver", "ask collect_children", "collect_children ends")
_SHOWN = ("signal deliver", "ask show_inputs", "show_inputs ends")
_STOPPED = ("signal cancel", "ask stop_children", "stop_children ends")


async def _handed_over(stage: Stage) -> Driven:
    """The first turn has handed two tasks to children, and they work."""
    stage.script({(0, 0): _DELEGATED})
    stage.outside.pending = _KEYS
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("dispatch_children ends")
    return session


async def _asked(stage: Stage) -> Driven:
    """A child asks people, and the turn has parked with that."""
    session = await _handed_over(stage)
    stage.outside.asked = _ASKED
    await session.deliver("dlv_asks", token="", kind=CHILD_INPUT, request_id="inp_1")
    await session.parked()
    return session


async def _end(session: Driven) -> None:
    """Both children end."""
    for number, key in enumerate(_KEYS):
        await session.deliver(f"dlv_end_{number}", token="", kind=CHILD_RESULT, action=key)


@CHILDREN.add({"": (*_STARTED, *_COLLECTED, *_TURN, *_TURN), "turn-0": ("call_tool ends", "ends")})
async def handed_over(stage: Stage) -> None:
    """A message that comes while children work begins the turn after; a result that comes twice counts once."""
    session = await _handed_over(stage)
    await session.deliver("dlv_1")
    await _end(session)
    await _end(session)


@CHILDREN.add({"": ("ask call_model", "ask call_tool", "ask dispatch_children", *_COLLECTED, "ask call_model")})
async def inline_handed_over(stage: Stage) -> None:
    stage.bench.turns = "inline"
    await _end(await _handed_over(stage))


@CHILDREN.add({"": (*_STARTED, *_STOPPED, *_COLLECTED, "ask conclude_turn", "conclude_turn ends")})
async def cancelled_with_children(stage: Stage) -> None:
    """The turn ends as cancelled when its children have ended."""
    session = await _handed_over(stage)
    await session.handle.signal("cancel", {"turnId": "turn_0"})
    await stage.until("stop_children ends")
    await _end(session)


@CHILDREN.add(
    {
        "": (*_STARTED, *_SHOWN, "signal deliver", *_TURN, *_COLLECTED, *_TURN),
        "turn-1": ("ask resume_turn", "resume_turn ends", "ends"),
    }
)
async def asked_by_a_child(stage: Stage) -> None:
    """A child asks people: the turn parks, and the answer begins one that waits for the same children."""
    session = await _asked(stage)
    await session.deliver("dlv_answered", token="", kind=CHILD_ANSWER, request_id="inp_1")
    await stage.until("resume_turn ends", part="turn-1")
    await _end(session)


@CHILDREN.add(
    {
        "": (*_STARTED, *_SHOWN, "ask turn", *_STOPPED, *_COLLECTED, "ask conclude_turn", "conclude_turn ends"),
        "turn-1": ("ask resume_turn", "is to stop", "resume_turn is stopped", "ends"),
    }
)
async def cancelled_with_an_answer(stage: Stage) -> None:
    """A cancel comes while the answer is processed: the children end before the turn."""
    session = await _asked(stage)
    stage.outside.before["resume_turn"] = hangs
    await session.deliver("dlv_answered", token="", kind=CHILD_ANSWER, request_id="inp_1")
    await stage.until("ask resume_turn", part="turn-1")
    await session.handle.signal("cancel", {"turnId": "turn_1"})
    await stage.until("stop_children ends")
    await _end(session)


@CHILDREN.add(
    {
        "": (
            *(*_STARTED, *_SHOWN, "signal deliver", "ask stop_children", "stop_children ends"),
            *(*_COLLECTED, "ask withdraw_inputs", "withdraw_inputs ends", *_TURN),
        )
    }
)
async def cleared_with_children(stage: Stage) -> None:
    """A control does not wait for answers: the children of the parked turn end, then the turn."""
    session = await _asked(stage)
    await session.deliver("dlv_clear", token="", kind=CLEAR)
    await stage.until("stop_children ends")
    await _end(session)


@CHILDREN.add(
    {
        "": (
            *(*_TURN, "ask dispatch_children", "signal cancel", "dispatch_children fails", "timer fires"),
            *("ask stop_children", "stop_children ends", "ask conclude_turn", "conclude_turn ends"),
        )
    }
)
async def cancelled_before_children_start(stage: Stage) -> None:
    """No worker declares their agent any more, and the driver does not try for ever."""
    stage.script({(0, 0): _DELEGATED})
    gate = stage.hold("dispatch_children")

    async def refuses() -> None:
        await gate()
        raise ApplicationError("no", {}, type="AGENT_GONE", non_retryable=True)

    stage.outside.before["dispatch_children"] = refuses
    session = await stage.start()
    await session.deliver("dlv_0")
    await gate.reached()
    await session.handle.signal("cancel", {"turnId": "turn_0"})
    gate.open()


@CHILDREN.add({"": ("signal deliver", "ask refuse_delivery", "refuse_delivery ends")})
async def a_child_that_is_late(stage: Stage) -> None:
    """Nobody waits for the result."""
    session = await stage.start()
    await session.deliver("dlv_late", token="", kind=CHILD_RESULT, action="subagent-call:clerk:c9")


@CHILDREN.add(
    {"": (*_STARTED, "signal repair", "ask close_session", "close_session ends", "ask stop_children", "ends")}
)
async def failed_with_children(stage: Stage) -> None:
    """An operator ends the session while its children work."""
    session = await _handed_over(stage)
    await session.handle.signal("repair", {"how": "fail"})
