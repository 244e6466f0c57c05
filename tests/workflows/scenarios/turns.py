"""What turns read, do and end with."""

import asyncio
from datetime import UTC, datetime

from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Concluded,
    Finished,
    ModelCall,
    ModelOutcome,
    NothingToRead,
    Parked,
    ToolCall,
    ToolOutcome,
)
from perdure.store.engine.rows import stamp

from .stage import ASKED, Gate, Stage, Table, Unstoppable, calls

TURNS = Table()

_TURN = ("ask turn", "turn begins", "turn ends")
_FAILED = ("call_model fails", "ask conclude_turn", "conclude_turn ends", "ends")
_LOST = ApplicationError("no", {"structural": False}, type="MODEL_CALL_FAILED", non_retryable=True)
_GONE = ApplicationError("gone", {"structural": True}, type="AGENT_GONE", non_retryable=True)


@TURNS.add(
    {
        "": ("signal deliver", "ask refuse_delivery", "refuse_delivery ends", *_TURN * 4, "ends"),
        "turn-0": ("begins", "ask call_model", "call_model ends", "ends"),
        "turn-1": ("ask call_tool", "ask call_tool", "call_tool ends", "call_tool ends", "ask call_model", "ends"),
        "turn-2": _FAILED,
        "turn-3": _FAILED,
    }
)
async def session(stage: Stage) -> None:
    """A text turn, a turn with two tools at once, a failed turn, a structural end."""
    stage.script({(1, 0): calls(2), (2, 0): _LOST, (3, 0): _GONE})
    session = await stage.start()
    await session.deliver("dlv_stale", token="old")
    for number in range(4):
        await session.deliver(f"dlv_{number}")


@TURNS.add({"": ("ask turn", *["signal deliver"] * 5, "turn ends", *_TURN * 2)})
async def coalesced(stage: Stage) -> None:
    """Several deliveries are read by one turn; one that does not want that, and what comes after it, are not."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    for number in range(1, 4):
        await session.deliver(f"dlv_{number}", coalesce=True)
    await session.deliver("dlv_4")
    await session.deliver("dlv_3", coalesce=True)
    await stage.until(*["signal deliver"] * 6)
    said.gate.open()


@TURNS.add({"": (*["signal deliver"] * 3, "patch wait-to-collect", "timer", "timer fires", *_TURN, *_TURN)})
async def collected(stage: Stage) -> None:
    """Messages that are collected wait for one another, wherever they are in the queue."""
    session = await stage.start(attended=False)
    await session.deliver("dlv_0", coalesce=True)
    await session.deliver("dlv_1")
    await session.deliver("dlv_2", coalesce=True)
    await stage.work()


@TURNS.add({"": ("ask turn", *["signal deliver"] * 3, "patch drop-superseded", "turn ends", *_TURN)})
async def superseded(stage: Stage) -> None:
    """Messages wait, and a later one interrupts the session: it is the next that is read."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    for number in (1, 2):
        await session.deliver(f"dlv_{number}", at=stamp(datetime(2026, 11, 20, 12, number, tzinfo=UTC)))
    now = stamp(datetime(2026, 11, 20, 12, 3, tzinfo=UTC))
    await session.deliver("dlv_3", at=now, mode="interrupt", supersedes=now)
    await stage.until(*["signal deliver"] * 4)
    said.gate.open()


@TURNS.add({"": (*["signal deliver", "signal cancel", "signal deliver"], "patch supersede-as-stored", *_TURN)})
async def spared(stage: Stage) -> None:
    """A cancel meant the turn of a message that a later one supersedes: the turn of that one is not cancelled."""
    session = await stage.start(attended=False)
    before, now = (stamp(datetime(2026, 11, 20, 12, minute, tzinfo=UTC)) for minute in (1, 2))
    await session.deliver("dlv_0", at=before)
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0"})
    await session.deliver("dlv_1", at=now, mode="interrupt", supersedes=now)
    await stage.work()


@TURNS.add({"": ("signal deliver", "ask turn", "signal cancel", "patch cancel-names-what-waits", "turn ends")})
async def too_late(stage: Stage) -> None:
    """A cancel meant what a message has replaced whose turn runs: that turn goes on."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    before, now = (stamp(datetime(2026, 11, 20, 12, minute, tzinfo=UTC)) for minute in (1, 2))
    await session.deliver("dlv_1", at=now, mode="interrupt", supersedes=now)
    await said.gate.reached()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_0", "until": before})
    await stage.until("signal cancel")
    said.gate.open()


@TURNS.add({"": ("ask turn", "signal deliver", "turn ends", "patch forget-what-joined", "signal deliver", *_TURN)})
async def joined(stage: Stage) -> None:
    """A message enters the running turn, so that no other one begins for it."""
    stage.outside.answer = said = Unstoppable(Finished(joined=("dlv_1",)))
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.deliver("dlv_1", mode="steer")
    await stage.until(*["signal deliver"] * 2)
    said.gate.open()
    await stage.until("turn ends")
    await session.deliver("dlv_2")


@TURNS.add({"": ("ask turn", *["signal deliver"] * 3, "patch changed-references", "turn ends", *_TURN * 2)})
async def moved(stage: Stage) -> None:
    """The sender of a delivery that waits moves it before another one."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    for number in (1, 2):
        await session.deliver(f"dlv_{number}", at=stamp(datetime(2026, 11, 20, 12, number, tzinfo=UTC)))
    await session.deliver("dlv_2", at=stamp(datetime(2026, 11, 20, 12, 2, tzinfo=UTC)), order="1", edits=1)
    await stage.until(*["signal deliver"] * 4)
    said.gate.open()


@TURNS.add({"": ("signal deliver", "signal deliver", "patch inbox-in-order", *_TURN, *_TURN)})
async def overtaken(stage: Stage) -> None:
    """A delivery that was accepted earlier arrives later."""
    session = await stage.start(attended=False)
    for number, at in ((1, "2026-01-01T00:00:02Z"), (0, "2026-01-01T00:00:01Z")):
        ref = DeliveryRef(id=f"dlv_{number}", token_hash="now", at=at)
        await session.handle.signal(names.DELIVER, ref.model_dump(mode="json"))
    await stage.work()


@TURNS.add({"": ("signal deliver", "signal deliver", "signal cancel", "signal repair", "signal other", *_TURN)})
async def unreadable_signals(stage: Stage) -> None:
    """Signals of shapes that this build does not know, and the same delivery twice."""
    session = await stage.start()
    for signal in ("text", None, {"id": 3}, {"tokenHash": "now", "version": 99}):
        await session.handle.signal(names.DELIVER, signal)
    await session.handle.signal(names.DELIVER, args=["one", "two"])
    await session.handle.signal(names.CANCEL, args=[[1], "two"])
    await session.handle.signal(names.REPAIR, {"how": "sing"})
    await session.handle.signal("other", {"a": 1})
    await session.deliver("dlv_0")
    await session.deliver("dlv_0")


@TURNS.add(
    {
        "": ("signal deliver", "patch keep-unknown-kinds", "goes on in a new run"),
        "run-1": (
            *("begins", "ask refuse_delivery", "refuse_delivery ends"),
            *("signal deliver", "signal deliver", *_TURN),
        ),
    }
)
async def unknown_kinds(stage: Stage) -> None:
    """Of two deliveries that only a newer build can read, the one of long ago gets one look and is refused."""
    session = await stage.start()
    await session.deliver("dlv_0", kind="later", at="2026-01-01T00:00:00.000Z")
    await stage.until("refuse_delivery ends", part="run-1")
    await session.deliver("dlv_1", kind="later", at=stamp(datetime.now(UTC)))
    await session.deliver("dlv_2")
    await stage.until(*_TURN, part="run-1")


@TURNS.add(
    {
        "": (
            *("signal deliver", "patch controls", *_TURN, *_TURN),
            *("signal deliver", "ask withdraw_inputs", "withdraw_inputs ends", *_TURN, *_TURN, "ends"),
        )
    }
)
async def controls(stage: Stage) -> None:
    """A compaction, a clear while people are asked, and a reset: the last one ends the session."""
    outcomes = [NothingToRead(), Parked(open=(ASKED,)), NothingToRead(), NothingToRead(over=True)]

    async def say(call: ModelCall) -> ModelOutcome:
        return outcomes.pop(0)

    stage.outside.answer = say
    session = await stage.start()
    await session.deliver("dlv_0", kind="compact", token="")
    await session.deliver("dlv_1")
    await stage.until("signal deliver", *_TURN * 2)
    await session.deliver("dlv_2", kind="clear", token="")
    await stage.until("withdraw_inputs ends", *_TURN)
    await session.deliver("dlv_3", kind="reset", token="")


@TURNS.add({"": (*_TURN, "signal deliver", "patch look-when-unknown-arrives", "timer", "signal deliver", *_TURN)})
async def unknown_kind_for_a_driver_that_waits(stage: Stage) -> None:
    """It has waited without an end, and from now on waits until it is time to look for a newer build."""
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until(*_TURN)
    await session.idle()
    await session.deliver("dlv_1", kind="later", at=stamp(datetime.now(UTC)))
    await stage.until("timer")
    await session.deliver("dlv_2")
    await stage.until(*_TURN, *_TURN)


@TURNS.add({"": ("begins", "timer", "signal deliver", *_TURN)})
async def began_with_an_unknown_kind(stage: Stage) -> None:
    """The run began with a delivery in its inbox that only a newer build can read."""
    kept = DeliveryRef(id="dlv_0", kind="?later", token_hash="now", at=stamp(datetime.now(UTC)))
    session = await stage.start(inbox=(kept,))
    await stage.until("timer")
    await session.deliver("dlv_1")
    await stage.until(*_TURN)


@TURNS.add(
    {
        "": (*_TURN, "ask turn", "turn ends", "ask refuse_delivery", "refuse_delivery ends", *_TURN),
        "turn-0": (
            "ask call_tool",
            "ask call_tool",
            "call_tool ends",
            *["ask call_tool"] * 3,
            "ask call_model",
            "ends",
        ),
    }
)
async def rekeyed(stage: Stage) -> None:
    """Five calls, two at a time: some fail, and two give the session another token. The later one counts.

    Then a message comes with the new token, one with the first, and one with a token that never was the session's.
    """
    tokens = {"c1": ("newest", 9), "c2": ("newer", 6)}

    async def act(call: ToolCall) -> ToolOutcome:
        token, head = tokens.get(call.call.call_id, (None, None))
        status = "failed" if call.call.call_id in ("c0", "c3") else "completed"
        return ToolOutcome(call_id=call.call.call_id, status=status, token_hash=token, head=head)

    stage.script({(0, 0): calls(5, parallel=2, head=4, model="provider/model"), (0, 1): Finished(head=12)})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("turn ends")
    for token in ("newest", "now", "newer"):
        await session.deliver(f"dlv_{token}", token=token)


@TURNS.add({"": (*_TURN, "patch tokens-in-between", *_TURN)})
async def rekeyed_twice(stage: Stage) -> None:
    """Two steps give the session another token each; a message comes with the first of them."""

    async def act(call: ToolCall) -> ToolOutcome:
        token = f"token of {call.at.step}"
        return ToolOutcome(call_id=call.call.call_id, status="completed", token_hash=token, head=5 + call.at.step)

    stage.script({(0, 0): calls(1, head=4), (0, 1): calls(1, head=6), (0, 2): Finished(head=12)})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("turn ends")
    await session.deliver("dlv_1", token="token of 0")


@TURNS.add({"turn-0": (*["ask call_tool"] * 3, "call_tool ends", "ask call_tool", "ask call_model", "ends")})
async def called_in_turns(stage: Stage) -> None:
    """Calls of different bounds, whose ends come in another order than their beginnings."""
    gates = {name: Gate() for name in ("a", "b", "c", "d", "e")}

    async def act(call: ToolCall) -> None:
        await gates[call.call.call_id]()

    bounds = enumerate(gates)
    refs = tuple(CallRef(call_id=name, tool="act", timeout=60.0 + n, attempts=1 + n) for n, name in bounds)
    stage.script({(0, 0): Calls(calls=refs, parallel=3)})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")
    for name in ("c", "b", "d", "e", "a"):
        await gates[name].reached()
        gates[name].open()
        await stage.until(*["call_tool ends"] * (["c", "b", "d", "e", "a"].index(name) + 1), part="turn-0")


@TURNS.add({"": _TURN, "turn-0": ("patch parallel-calls", *["ask call_tool"] * 16, "call_tool ends", "ask call_tool")})
async def unlimited_calls(stage: Stage) -> None:
    """More calls than may run at once, and a step that names no limit."""
    stage.script({(0, 0): calls(18)})
    session = await stage.start()
    await session.deliver("dlv_0")


@TURNS.add(
    {
        "": (*_TURN, *_TURN),
        "turn-0": (
            *("ask call_tool", "ask call_tool", "call_tool fails", "call_tool ends"),
            *("ask conclude_turn", "conclude_turn ends", "ends"),
        ),
    }
)
async def lost_call(stage: Stage) -> None:
    """One of two calls fails for good while the other one runs: that one ends first, and no third one begins."""
    gate = Gate()

    async def act(call: ToolCall) -> None:
        if call.call.call_id == "c0":
            await gate()
            return
        raise ApplicationError("no", {"details": {"errorId": "e"}}, type="TOOL_LOST", non_retryable=True)

    stage.script({(0, 0): calls(3, parallel=2)})
    stage.tools(act)
    stage.outside.concluded_as = Concluded(token_hash="later", head=8, over=False)
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("call_tool fails", part="turn-0")
    gate.open()
    await stage.until("turn ends")
    await session.deliver("dlv_1", token="later")


@TURNS.add({"turn-0": ("ask call_tool", "call_tool times out", "ask conclude_turn", "conclude_turn ends", "ends")})
async def silent_call(stage: Stage) -> None:
    """A worker falls silent, and there is no other attempt."""

    async def act(call: ToolCall) -> None:
        await asyncio.sleep(3)

    ref = CallRef(call_id="a", tool="act", heartbeat=1.0, attempts=1)
    stage.script({(0, 0): Calls(calls=(ref,))})
    stage.tools(act)
    session = await stage.start()
    await session.deliver("dlv_0")


@TURNS.add({"": (*_TURN, "patch silent-turns-keep-their-number", *_TURN), "turn-0": ("call_model ends", "ends")})
async def unheard(stage: Stage) -> None:
    """A turn that found nothing to consume leaves its number to the next one."""
    consumed: list[str] = []

    async def answer(call: ModelCall) -> ModelOutcome:
        consumed.append(call.at.session_id)
        return Finished() if len(consumed) > 1 else NothingToRead()

    stage.outside.answer = answer
    session = await stage.start()
    await session.deliver("dlv_0")
    await stage.until("patch silent-turns-keep-their-number")
    await session.deliver("dlv_1")


@TURNS.add({"": ("turn begins", "turn is terminated", "ask conclude_turn", "conclude_turn ends", *_TURN)})
async def terminated_turn(stage: Stage) -> None:
    """An operator terminates a turn; its driver reports it and continues."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start()
    await session.deliver("dlv_0")
    await said.gate.reached()
    await stage.client.get_workflow_handle(names.turn_workflow(session.handle.id, 0)).terminate()
    await stage.until("conclude_turn ends")
    said.gate.open()
    await session.deliver("dlv_1")


@TURNS.add(
    {
        "": ("turn begins", "turn fails", "ask conclude_turn", "conclude_turn ends", *_TURN),
        "turn-0": ("call_model fails", "ask conclude_turn", "conclude_turn fails", "fails"),
    }
)
async def turn_that_cannot_say_its_end(stage: Stage) -> None:
    stage.script({(0, 0): _LOST})
    stage.outside.concluding_fails = [ApplicationError("unreadable", type="UNREADABLE_STATE", non_retryable=True)]
    session = await stage.start()
    await session.deliver("dlv_0")
    await session.deliver("dlv_1")


@TURNS.add({"": ("ask conclude_turn", "conclude_turn fails", "timer", "timer fires", "ask conclude_turn", "ask turn")})
async def driver_that_cannot_say_an_end(stage: Stage) -> None:
    """A worker of another build calls it impossible; the driver asks again."""
    stage.outside.concluding_fails = [ApplicationError("unreadable", type="UNREADABLE_STATE", non_retryable=True)]
    session = await stage.start(cancel="this", inbox=(DeliveryRef(id="dlv_0", token_hash="now"),))
    await session.deliver("dlv_1")


@TURNS.add({"": (*_TURN, "ends"), "turn-0": ("ask call_tool", "call_tool ends", "ask call_model", "ends")})
async def task(stage: Stage) -> None:
    stage.script({(0, 0): calls(1)})
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")


@TURNS.add({"": (*_TURN, "ends"), "turn-0": _FAILED})
async def failed_task(stage: Stage) -> None:
    stage.script({(0, 0): _LOST})
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")


@TURNS.add({"": (*_TURN, *_TURN, "ends"), "turn-0": _FAILED})
async def task_that_is_not_over(stage: Stage) -> None:
    """The conclusion of the turn returns the session's status, and the driver believes it."""
    stage.script({(0, 0): _LOST})
    stage.outside.concluded_as = Concluded(token_hash="now", head=3, over=False)
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")
    await session.deliver("dlv_1")


@TURNS.add({"": ("ask turn", "signal deliver", "signal deliver", "turn ends", "ends")})
async def task_with_a_full_inbox(stage: Stage) -> None:
    """What is unread when the session ends is none of the driver's business."""
    stage.outside.answer = said = Unstoppable(Finished())
    session = await stage.start(mode="task")
    await session.deliver("dlv_0")
    await said.gate.reached()
    await session.deliver("dlv_1")
    await session.deliver("dlv_2", token="old")
    await stage.until("signal deliver", "signal deliver", "signal deliver")
    said.gate.open()
