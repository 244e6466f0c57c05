"""A cancel meets a session in each of its states."""

from datetime import UTC, datetime

from temporalio.exceptions import ApplicationError

from perdure.errors import TurnCancelled
from perdure.protocol import names
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Concluded, Finished, ModelCall, ModelOutcome, Parked, ToolCall
from perdure.session.state import Rebuild, SessionState
from perdure.store.engine.rows import stamp

from .stage import ASKED, Gate, Stage, Table, Unstoppable, calls, hangs

CANCELS = Table()

_TURN = ("ask turn", "turn begins", "turn ends")
_STOPPED = ("ask turn", "turn begins", "signal cancel", "stop turn", "turn ends")
_LOST = ApplicationError("no", {}, type="MODEL_CALL_FAILED", non_retryable=True)


class _Hanging:
    """A model that thinks for ever in one turn."""

    def __init__(self, turn: int = 0) -> None:
        self.gate = Gate()
        self._turn = turn

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        if call.at.turn == self._turn:
            self.gate.open()
            await self.gate()
            await hangs()
        return Finished()


@CANCELS.add({"": ("signal deliver", "signal cancel", "ask conclude_turn", "conclude_turn ends", "ask turn")})
async def cancel_before_the_turn(stage: Stage) -> None:
    session = await stage.start(attended=False)
    await session.deliver("dlv_0")
    await session.handle.signal(names.CANCEL, {})
    await stage.work()
    await stage.until("conclude_turn ends")
    await session.deliver("dlv_1")


@CANCELS.add({"": ("ask turn", "signal cancel", "turn begins", "stop turn", "turn ends")})
async def cancel_while_the_turn_begins(stage: Stage) -> None:
    """The server has been asked for the turn, and has not said yet that there is one."""
    stage.outside.answer = _Hanging()
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.handle.signal(names.CANCEL, {})


@CANCELS.add(
    {
        "": (*_STOPPED, "signal deliver", "ask turn", "turn ends"),
        "turn-0": ("ask call_model", "is to stop", "stop call_model", "call_model is stopped", "ask conclude_turn"),
    }
)
async def cancel_while_the_model_is_called(stage: Stage) -> None:
    stage.outside.answer = hanging = _Hanging()
    session = await stage.start()
    await session.deliver("dlv_0")
    await hanging.gate.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("turn ends")
    await session.deliver("dlv_1")


@CANCELS.add({"": ("stop turn", "signal cancel", "patch cancel-turn-once", "turn ends")})
async def cancelled_twice(stage: Stage) -> None:
    """The turn is asked once to stop, while its end is being written."""
    stage.outside.answer = hanging = _Hanging()
    concluding = stage.hold(names.CONCLUDE_TURN)
    session = await stage.start()
    await session.deliver("dlv_0")
    await hanging.gate.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await concluding.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("patch cancel-turn-once")
    concluding.open()


@CANCELS.add(
    {
        "": _STOPPED,
        "turn-0": (
            *("ask call_tool", "ask call_tool", "is to stop", "stop call_tool", "stop call_tool"),
            *("call_tool is stopped", "call_tool is stopped", "ask conclude_turn", "conclude_turn ends", "ends"),
        ),
    }
)
async def cancel_while_tools_run(stage: Stage) -> None:
    """Two of four calls run; the other two never begin."""
    begun = Gate()

    async def act(call: ToolCall) -> None:
        begun.open()
        await begun()
        await hangs()

    stage.script({(0, 0): calls(4, parallel=2)})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")
    await begun.reached()
    await stage.outside.until(lambda: len(stage.outside.tool_calls) == 2)
    await session.handle.signal(names.CANCEL, {})


@CANCELS.add({"": _STOPPED, "turn-0": ("is to stop", "call_tool ends", "call_tool ends", "ask conclude_turn", "ends")})
async def cancel_while_tools_end_well(stage: Stage) -> None:
    """No tool notices the cancellation; both outcomes are read, and the turn ends all the same."""
    gate = Gate()

    async def act(call: ToolCall) -> None:
        await gate()

    stage.script({(0, 0): calls(3, parallel=2)})
    stage.tools(act)
    stage.outside.concluded_as = Concluded(token_hash="later", head=9)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.outside.until(lambda: len(stage.outside.tool_calls) == 2)
    await session.handle.signal(names.CANCEL, {})
    await stage.until("is to stop", "stop call_tool", part="turn-0")
    gate.open()


@CANCELS.add(
    {
        "": _STOPPED,
        "turn-0": ("is to stop", "call_model ends", "patch stop-before-calls", "ask conclude_turn", "ends"),
    }
)
async def cancel_before_calls(stage: Stage) -> None:
    await cancelled_before_calls(stage, "is to stop", part="turn-0")


async def cancelled_before_calls(stage: Stage, word: str, *, part: str) -> None:
    """`word` and `part`: what the history of the turn's workflow has when it is to stop."""
    stage.outside.answer = said = Unstoppable(calls(2))
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until(word, part=part)
    said.gate.open()


@CANCELS.add(
    {
        "": ("ask turn", "turn ends", "ask turn", "turn ends"),
        "turn-0": ("ask call_model", "call_model fails", "ask conclude_turn", "conclude_turn ends", "ends"),
    }
)
async def cancel_that_a_step_finds(stage: Stage) -> None:
    """The step has found the cancel request in the store, before any signal."""
    found = ApplicationError("cancelled", type=TurnCancelled.code, non_retryable=True)
    stage.script({(0, 0): found})
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.deliver("dlv_1")


@CANCELS.add({"": ("ask turn", "signal cancel", "turn ends", "signal deliver", "ask turn", "turn ends")})
async def cancel_that_meets_the_end(stage: Stage) -> None:
    """The turn ends although it was cancelled: the next one is none of the cancel's business."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until("is to stop", part="turn-0")
    said.gate.open()
    await stage.until("turn ends")
    await session.deliver("dlv_1")


@CANCELS.add(
    {
        "": ("turn ends", *_STOPPED),
        "turn-1": ("ask resume_turn", "is to stop", "stop resume_turn", "ask conclude_turn", "ends"),
    }
)
async def cancel_while_resuming(stage: Stage) -> None:
    """While answers are carried out, the turn that asked is still the one that is cancelled."""
    await _parked_and_resuming(stage)


@CANCELS.add({"": ("turn ends", "ask turn", "signal cancel", "stop turn", "turn ends", "ask withdraw_inputs")})
async def cancel_while_resuming_leaves_requests(stage: Stage) -> None:
    """The conclusion finds that the turn had parked: what it asked is still open, and is withdrawn."""
    stage.outside.concluded_as = Concluded(token_hash="now", head=4, silent=True, over=False, open=(ASKED,))
    await _parked_and_resuming(stage)


async def _parked_and_resuming(stage: Stage) -> None:
    stage.script({(0, 0): Parked(open=(ASKED,))})
    stage.outside.before[names.RESUME_TURN] = hangs
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.parked()
    await session.deliver("ans_1", kind="answer")
    await stage.until("ask resume_turn", part="turn-1")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})


@CANCELS.add({"": ("ask remind", "signal cancel", "remind ends", "ask withdraw_inputs", "withdraw_inputs ends")})
async def cancel_while_reminding(stage: Stage) -> None:
    reminding = stage.hold(names.REMIND)
    session = await stage.start(open=(OpenInput(request_id="inp_1", remind_at=(1.0,)),), turn=1)
    await reminding.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until("signal cancel")
    reminding.open()


@CANCELS.add({"": ("ask refuse_delivery", "signal cancel", "refuse_delivery ends", "signal deliver", "ask turn")})
async def cancel_while_refusing(stage: Stage) -> None:
    """There is nothing to cancel any more, and the next message is read."""
    refusing = stage.hold(names.REFUSE_DELIVERY)
    session = await stage.start()
    await session.deliver("dlv_old", token="old")
    await refusing.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until("signal cancel")
    refusing.open()
    await stage.until("refuse_delivery ends")
    await stage.settled()
    await session.deliver("dlv_1")


@CANCELS.add(
    {
        "": (
            *("ask refuse_delivery", "signal cancel", "refuse_delivery ends"),
            *("ask conclude_turn", "signal cancel", "conclude_turn ends", "ask turn", "turn ends"),
        )
    }
)
async def cancel_while_concluding(stage: Stage) -> None:
    """Messages wait behind what is written: a cancel stops the first of them. Another one that comes while that is
    written is for the second one's turn, which finds it in the store: the driver forgets it."""
    refusing, concluding = stage.hold(names.REFUSE_DELIVERY), stage.hold(names.CONCLUDE_TURN)
    session = await stage.start()
    await session.deliver("dlv_old", token="old")
    await refusing.reached()
    await session.deliver("dlv_1")
    await session.deliver("dlv_2")
    await session.handle.signal(names.CANCEL, {})
    await stage.until("signal cancel")
    refusing.open()
    await concluding.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await stage.until("signal cancel", "signal cancel")
    concluding.open()


@CANCELS.add(
    {
        "": ("ask turn", "signal cancel", "stop turn", "turn ends", "ask turn", "turn ends"),
        "turn-0": ("ask conclude_turn", "is to stop", "patch conclude-to-the-end", "conclude_turn ends", "ends"),
    }
)
async def cancel_while_a_turn_concludes(stage: Stage) -> None:
    """A cancel of an end that is being written gets that end."""
    await cancelled_while_a_turn_concludes(stage, "is to stop", part="turn-0")


async def cancelled_while_a_turn_concludes(stage: Stage, *words: str, part: str) -> None:
    """`words` and `part`: what else the history of the turn's workflow has by then."""
    concluding = stage.hold(names.CONCLUDE_TURN)
    stage.script({(0, 0): _LOST})
    session = await stage.start()
    await session.deliver("dlv_0")
    await concluding.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.deliver("dlv_1")
    await stage.until(*words, "patch conclude-to-the-end", part=part)
    concluding.open()


@CANCELS.add({"": ("turn ends", "ask turn", "signal cancel", "turn ends"), "turn-1": ("call_model ends", "ends")})
async def cancel_that_is_late(stage: Stage) -> None:
    """The turn that it means has ended."""
    gate = Gate()

    async def answer(call: ModelCall) -> ModelOutcome:
        if call.at.turn == 1:
            await gate()
        return Finished()

    stage.outside.answer = answer
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.deliver("dlv_1")
    await gate.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.handle.query(names.DESCRIBE)
    gate.open()


@CANCELS.add({"": ("ask turn", "signal deliver", "signal cancel", "turn ends", "ask conclude_turn")})
async def cancel_that_is_early(stage: Stage) -> None:
    """Readers know that a turn has ended before its driver does, and mean the next one."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.deliver("dlv_1")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await session.handle.query(names.DESCRIBE)
    said.gate.open()


@CANCELS.add({"": ("signal cancel", "signal deliver", "ask turn", "turn ends", "signal cancel")})
async def cancel_while_idle(stage: Stage) -> None:
    session = await stage.start()
    await session.handle.signal(names.CANCEL, {})
    await session.deliver("dlv_0")
    await stage.until("turn ends")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})


@CANCELS.add(
    {
        "": (*_STOPPED, "ends"),
        "turn-0": ("is to stop", "call_model is stopped", "ask conclude_turn", "conclude_turn ends", "ends"),
    }
)
async def cancelled_task(stage: Stage) -> None:
    stage.outside.answer = hanging = _Hanging()
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")
    await hanging.gate.reached()
    await session.handle.signal(names.CANCEL, {})


@CANCELS.add({"": ("signal cancel", "ask conclude_turn", "conclude_turn ends", "ends")})
async def cancelled_task_before_its_turn(stage: Stage) -> None:
    session = await stage.start(attended=False, mode="task")
    await session.deliver("dlv_0")
    await session.handle.signal(names.CANCEL, {})
    await stage.work()


@CANCELS.add({"": ("ask withdraw_inputs", "signal cancel", "withdraw_inputs ends", "signal deliver", *_TURN)})
async def cancel_while_withdrawing(stage: Stage) -> None:
    """The withdrawal is the whole effect of both cancels; the next message is read."""
    withdrawing = stage.hold(names.WITHDRAW_INPUTS)
    session = await stage.start(open=(ASKED,), turn=1, cancel="this")
    await withdrawing.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until("signal cancel")
    withdrawing.open()
    await stage.until("withdraw_inputs ends")
    await stage.settled()
    await session.deliver("dlv_0")


@CANCELS.add({"": ("ask rebuild_session", "signal cancel", "rebuild_session ends", "ask withdraw_inputs", *_TURN)})
async def cancel_while_rebuilding(stage: Stage) -> None:
    """The driver has nothing to cancel yet; the store contains the cancel request."""
    rebuilding = stage.hold(names.REBUILD_SESSION)
    session = await stage.start(agent="", token_hash="", rebuild=Rebuild(reason="WORKFLOW_LOST"))
    state = SessionState(session_id=session.handle.id, agent="demo", token_hash="now", turn=1)
    found = state.model_copy(update={"open": (ASKED,), "cancel": "this"})
    stage.outside.rebuilds = found.model_dump(mode="json")
    await rebuilding.reached()
    await session.handle.signal(names.CANCEL, {})
    await stage.until("signal cancel")
    rebuilding.open()
    await stage.until("withdraw_inputs ends")
    await session.deliver("dlv_0")


@CANCELS.add(
    {
        "": ("ask attend_session", "signal deliver", "signal cancel", "signal repair", "goes on in a new run"),
        "run-1": ("begins", "ask attend_session"),
    }
)
async def cancel_while_unreadable(stage: Stage) -> None:
    """It is in the store for the build that can read the session's state."""
    session = await stage.start(data={"version": 999})
    await stage.until("timer")
    await session.deliver("dlv_0")
    await session.handle.signal(names.CANCEL, {})
    await session.handle.signal(names.REPAIR, {"how": "retry"})


@CANCELS.add({"": ("signal deliver", "signal cancel", "ask refuse_delivery", "refuse_delivery ends", *_TURN)})
async def cancel_of_an_unknown_kind(stage: Stage) -> None:
    """The delivery that was to begin the turn is refused."""
    session = await stage.start()
    await session.deliver("dlv_0", kind="later", at=stamp(datetime.now(UTC)))
    await stage.until("timer")
    await session.handle.signal(names.CANCEL, {})
    await stage.until("refuse_delivery ends")
    await session.deliver("dlv_1")
