"""A driver, its turn or its operator cannot continue as usual."""

import asyncio
from typing import Any

from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Coordinates, Failure, Finished, ModelCall, ModelOutcome, TurnRequest
from perdure.session.state import OPERATOR_TERMINATED, Rebuild, SessionState
from tests.support.workflows import Driven

from .stage import ASKED, Gate, Stage, Table, calls, hangs

CARE = Table()

_TURN = ("ask turn", "turn begins", "turn ends")
_HELD = (*_TURN, "ask attend_session", "attend_session ends")
_AGENT_GONE = ApplicationError("no such agent", {"held": True}, type="AGENT_GONE", non_retryable=True)


class _Away:
    """No worker can serve the session until one comes back; from this step on."""

    def __init__(self, step: int = 0) -> None:
        self.gone = True
        self._step = step

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        if call.at.step < self._step:
            return calls(1, head=7, model="provider/model")
        if self.gone:
            raise _AGENT_GONE
        return Finished()


async def _held(stage: Stage, step: int = 0, **state: Any) -> tuple[Driven, _Away]:
    stage.outside.answer = away = _Away(step)
    session = await stage.start(**state)
    await session.deliver("dlv_0")
    await stage.until("attend_session ends")
    return session, away


@CARE.add(
    {
        "": (*_HELD, "timer", "timer fires", *_TURN),
        "turn-0": ("call_model ends", "call_tool ends", "ask call_model", "call_model fails", "ends"),
        "turn-0-run-1": ("begins", "ask call_model", "call_model ends", "ends"),
    }
)
async def held_session(stage: Stage) -> None:
    """A turn that is held in its second step continues there by itself."""
    _, away = await _held(stage, step=1)
    away.gone = False


@CARE.add({"": (*_HELD, *_TURN, "ask attend_session", "attend_session ends", "timer", "timer fires", *_TURN)})
async def held_twice(stage: Stage) -> None:
    """Each pause is longer than the one before."""
    _, away = await _held(stage)
    await stage.until("attend_session ends", "attend_session ends")
    away.gone = False


@CARE.add(
    {
        "": (
            *(*_HELD, "timer", "signal deliver", "patch only-news-makes-due", "signal deliver", "timer is cancelled"),
            *(*_TURN, *_TURN),
        )
    }
)
async def held_until_news(stage: Stage) -> None:
    """What is signalled again is not new; another message is, and has the turn tried again."""
    session, away = await _held(stage, tries=9)
    await stage.until("timer")
    away.gone = False
    await session.deliver("dlv_0")
    await stage.until("patch only-news-makes-due")
    await session.deliver("dlv_1")


@CARE.add({"": (*_HELD, "timer", "signal repair", "timer is cancelled", *_TURN)})
async def held_until_retried(stage: Stage) -> None:
    session, away = await _held(stage, tries=9)
    await stage.until("timer")
    away.gone = False
    await session.handle.signal(names.REPAIR, {"how": "retry"})


@CARE.add({"": (*_HELD, "timer", "signal cancel", "timer is cancelled", "ask conclude_turn", "conclude_turn ends")})
async def held_until_cancelled(stage: Stage) -> None:
    session, _ = await _held(stage, tries=9)
    await stage.until("timer")
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})


@CARE.add({"": ("ask attend_session", "signal cancel", "attend_session ends", "ask conclude_turn")})
async def cancel_while_attention_is_asked_for(stage: Stage) -> None:
    stage.outside.answer = _Away()
    attending = stage.hold(names.ATTEND_SESSION)
    session = await stage.start(tries=9)
    await session.deliver("dlv_0")
    await attending.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await stage.until("signal cancel")
    attending.open()


@CARE.add({"": (*_HELD, "timer", "signal repair", "ask rebuild_session", "rebuild_session ends", *_TURN)})
async def rebuilt_by_an_operator(stage: Stage) -> None:
    """The turn that is held is forgotten; the store says what is to be done."""
    session, away = await _held(stage, tries=9)
    await stage.until("timer")
    away.gone = False
    stage.outside.rebuilds = _state(session.handle.id, turn=5, inbox=(DeliveryRef(id="dlv_0", token_hash="now"),))
    await session.handle.signal(names.REPAIR, {"how": "rebuild"})


@CARE.add({"": ("ask turn", "turn is refused", "ask attend_session", "timer", "timer fires", *_TURN)})
async def turn_that_runs_already(stage: Stage) -> None:
    """Another workflow has the turn's id."""
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("turn ends")
    turn = names.turn_workflow(session.handle.id, 1)
    other = await stage.client.start_workflow("Other", id=turn, task_queue="nobody")
    await session.deliver("dlv_1")
    await stage.until("attend_session ends")
    await other.terminate()


@CARE.add({"": (*_HELD, "timer"), "turn-0": ("begins", "ends")})
async def unreadable_snapshot(stage: Stage) -> None:
    """The turn cannot read what turns remember of one another, and does nothing."""
    session = await stage.start(snapshot={"version": 999, "data": {"wisdom": 3}}, tries=9)
    await session.deliver("dlv_0")


@CARE.add({"": ("begins", "ask conclude_turn", "conclude_turn ends", "ends")})
async def turn_of_an_old_driver(stage: Stage) -> None:
    """The same for a driver that holds no turns: it is concluded."""
    await stage.work()
    request = TurnRequest.model_validate(
        {"session_id": "ses_old", "turn": 1, "agent": "demo", "snapshot": {"version": 999}}
    )
    stage.started = await stage.client.start_workflow(
        names.TURN_WORKFLOW,
        request,
        id=f"{stage.bench.settings.task_queue}/turn/1",
        task_queue=names.queue(stage.bench.settings.task_queue, names.TURNS_QUEUE),
    )


# --- an unreadable state ------------------------------------------------------------------------------------


@CARE.add(
    {
        "": ("begins", "ask attend_session", "timer", "signal deliver", "signal repair", "goes on in a new run"),
        "run-1": ("begins", "ask attend_session", "attend_session ends", "timer"),
    }
)
async def unreadable_state(stage: Stage) -> None:
    """It is kept, with all that comes in, and taken to a fresh run."""
    future = {"version": 999, "sessionId": "x", "wisdom": 3, "inbox": [{"id": "dlv_0"}]}
    session = await stage.start(data=future)
    await stage.until("timer")
    await session.deliver("dlv_1")
    await session.deliver("dlv_1")
    await session.handle.signal(names.DELIVER, {"version": 999, "id": "dlv_2"})
    await session.handle.signal(names.DELIVER, args=["one", "two"])
    await session.handle.signal(names.REPAIR, {"how": "retry"})


@CARE.add({"": ("ask attend_session", "timer", "timer fires", "goes on in a new run")})
async def unreadable_state_that_is_read_again(stage: Stage) -> None:
    """After a minute, by itself."""
    await stage.start(data={"version": 999})
    await stage.until("timer")
    await asyncio.sleep(55)


@CARE.add({"": ("begins", "ask attend_session", "attend_session ends", *_TURN)})
async def state_that_can_be_read_again(stage: Stage) -> None:
    """The attention is taken back, and what could not be read meanwhile is read."""
    delivery = DeliveryRef(id="dlv_0", token_hash="now").model_dump(mode="json")
    state = _state("ses_unread")
    await stage.start(data={**state, "inbox": [delivery, delivery], "wasUnreadable": True})


@CARE.add(
    {
        "": ("begins", "ask attend_session", "timer", "signal deliver", "signal repair", "goes on in a new run"),
        "run-1": ("begins", "ask attend_session", "attend_session ends", "timer"),
    }
)
async def state_of_the_next_version(stage: Stage) -> None:
    """The state is whole, but only the next build can read it; deliveries arrive meanwhile."""
    session = await stage.start(data={**_state("ses_next", turn=3), "version": 2})
    await stage.until("timer")
    await session.deliver("dlv_1")
    await session.handle.signal(names.REPAIR, {"how": "retry"})


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", "ask attend_session", "attend_session ends", "timer")})
async def rebuilt_in_the_next_version(stage: Stage) -> None:
    """The next build has derived the state from the store."""
    stage.outside.rebuilds = {**_state("ses_lost", turn=3), "version": 2}
    await _from_store(stage)
    await stage.until("timer")


@CARE.add({"": ("ask attend_session", "signal deliver", "signal repair", "ask rebuild_session", *_TURN)})
async def unreadable_state_that_is_rebuilt(stage: Stage) -> None:
    session = await stage.start(data={"version": 999})
    await stage.until("attend_session ends")
    stage.outside.rebuilds = _state(session.handle.id, turn=7)
    await session.deliver("dlv_0")
    await session.handle.signal(names.REPAIR, {"how": "rebuild"})


# --- from the store -----------------------------------------------------------------------------------------


@CARE.add({"": ("ask rebuild_session", "signal deliver", "rebuild_session ends", *_TURN, *_TURN)})
async def rebuilt(stage: Stage) -> None:
    """A driver is started from the store, and a message comes while the store is read."""
    rebuilding = stage.hold(names.REBUILD_SESSION)
    stage.outside.rebuilds = _state("x", turn=3, inbox=(DeliveryRef(id="dlv_0", token_hash="now"),))
    session = await _from_store(stage)
    await rebuilding.reached()
    await session.deliver("dlv_1")
    await session.deliver("dlv_0")
    await stage.until("signal deliver", "signal deliver")
    rebuilding.open()


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", *_TURN), "turn-4": ("ask resume_turn", "ends")})
async def rebuilt_with_a_turn_to_resume(stage: Stage) -> None:
    """The turn that ran when the workflow was lost is held, and continues at once, with the people's answers."""
    request = TurnRequest(
        session_id="ses_lost",
        turn=4,
        agent="demo",
        deliveries=(DeliveryRef(id="ans_1", kind="answer", token_hash="now"),),
        open=(ASKED,),
        expired=("inp_1",),
        token_hash="now",
        holds=True,
    )
    held = request.model_dump(mode="json")
    stage.outside.rebuilds = _state("ses_lost", turn=4, told=4, open=(ASKED,), held=held, retry_at=0.0)
    await _from_store(stage)


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", "ask withdraw_inputs")})
async def rebuilt_and_cancelled(stage: Stage) -> None:
    """The store knows of a cancel that the lost driver has not carried out."""
    stage.outside.rebuilds = _state("ses_lost", turn=4, told=4, open=(ASKED,), cancel="this")
    await _from_store(stage)


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", "ask close_session", "close_session ends", "ends")})
async def rebuilt_to_end(stage: Stage) -> None:
    """A workflow was terminated: the driver that follows ends its session."""
    stage.outside.rebuilds = _state("x")
    await _from_store(stage, ends=OPERATOR_TERMINATED)


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", "ends")})
async def rebuilt_after_the_end(stage: Stage) -> None:
    """The session has ended: there is nothing to drive."""
    await _from_store(stage)


@CARE.add({"": ("ask rebuild_session", "rebuild_session ends", "ask attend_session", "attend_session ends", "timer")})
async def rebuilt_unreadably(stage: Stage) -> None:
    """A newer build has derived the state: it is kept for that."""
    stage.outside.rebuilds = {"version": 999}
    await _from_store(stage)


def _state(session_id: str, **more: Any) -> dict[str, Any]:
    values = {"session_id": session_id, "agent": "demo", "token_hash": "now", "head": 20, **more}
    return SessionState.model_validate(values).model_dump(mode="json")


async def _from_store(stage: Stage, ends: Failure | None = None) -> Driven:
    return await stage.start(agent="", token_hash="", rebuild=Rebuild(reason="WORKFLOW_LOST", ends=ends))


# --- an operator ends it ------------------------------------------------------------------------------------


class _Thinking:
    def __init__(self) -> None:
        self.gate = Gate()

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        self.gate.open()
        await self.gate()
        await hangs()
        raise AssertionError(Coordinates)


async def _thinking(stage: Stage) -> Driven:
    stage.outside.answer = thinking = _Thinking()
    session = await stage.start()
    await session.deliver("dlv_0")
    await thinking.gate.reached()
    return session


@CARE.add({"": ("signal repair", "ask close_session", "close_session ends", "ends")})
async def failed_by_an_operator(stage: Stage) -> None:
    session = await stage.start()
    await session.handle.signal(names.REPAIR, {"how": "fail"})


@CARE.add(
    {
        "": ("turn begins", "signal repair", "stop turn", "turn ends", "ask close_session", "ends"),
        "turn-0": ("is to stop", "stop call_model", "ask conclude_turn", "conclude_turn ends", "ends"),
    }
)
async def failed_by_an_operator_in_a_turn(stage: Stage) -> None:
    session = await _thinking(stage)
    await session.handle.signal(names.REPAIR, {"how": "fail"})


@CARE.add({"": ("ask attend_session", "signal repair", "ask close_session", "close_session ends", "ends")})
async def failed_by_an_operator_unread(stage: Stage) -> None:
    session = await stage.start(data={"version": 999})
    await stage.until("timer")
    await session.handle.signal(names.REPAIR, {"how": "fail"})


@CARE.add({"": ("is to stop", "ask close_session", "close_session ends", "is cancelled")})
async def cancelled_by_an_operator(stage: Stage) -> None:
    session = await stage.start(open=(ASKED,), turn=1)
    await session.parked()
    await session.handle.cancel()


@CARE.add(
    {
        "": ("turn begins", "is to stop", "stop turn", "ask close_session", "close_session ends", "is cancelled"),
        "turn-0": ("is to stop", "stop call_model", "ask conclude_turn", "conclude_turn ends", "ends"),
    }
)
async def cancelled_by_an_operator_in_a_turn(stage: Stage) -> None:
    session = await _thinking(stage)
    await session.handle.cancel()


@CARE.add({"": ("signal repair", "timer", "stop turn", "timer fires", "ask close_session", "ends")})
async def failed_by_an_operator_without_a_worker(stage: Stage) -> None:
    """The turn is given half a minute to stop."""
    stage.outside.answer = thinking = _Thinking()
    working = await stage.work()
    session = await stage.start(attended=False)
    await session.deliver("dlv_0")
    await thinking.gate.reached()
    await working.stop_turns()
    await session.handle.signal(names.REPAIR, {"how": "fail"})
    await stage.until("timer fires")


@CARE.add({"": ("turn begins", "is terminated"), "turn-0": ("ask call_model", "is terminated")})
async def terminated_by_an_operator(stage: Stage) -> None:
    """No request is opened; the driver that follows is that of `rebuilt-to-end`."""
    session = await _thinking(stage)
    await session.handle.terminate()
