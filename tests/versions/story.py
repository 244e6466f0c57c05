"""Sessions in which events of every type happen."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from perdure import Agent, AgentRegistry, Compaction, Planning, Run, RunContext, RunStepFailed, State, ToolContext, tool
from perdure.agents.run import RunRegistry
from perdure.errors import ModelFailed
from perdure.harness.rebuild import cut_after
from perdure.harness.runs.runner import RunRunner
from perdure.harness.tools.progress import discard_unreadable
from perdure.models.base import Delta, Prompt, ReasoningDelta, Reply, TextDelta, ToolInputDelta, finish_reason, usage_of
from perdure.protocol.deliveries import CLEAR, LOCAL, Capabilities, DeliveryBody, DeliveryRef
from perdure.protocol.events import cancel_requested
from perdure.protocol.inputs import APPROVE, InputAnswer
from perdure.protocol.requests import (
    Attention,
    Calls,
    CloseSession,
    CollectChildren,
    Coordinates,
    Delegated,
    DispatchChildren,
    Failure,
    ModelCall,
    RebuildSession,
    Refusal,
    Reminder,
)
from perdure.protocol.runs import RunBody
from perdure.protocol.wire import JsonObject
from perdure.runtime.signals import cancel_turn
from perdure.session.state import OPERATOR_FAILED
from perdure.store.checkpoints import LARGEST_SNAPSHOT, Rollback
from perdure.store.deliveries import CancelRequest, DeliveryRow, NewDelivery
from perdure.store.lifecycle import Export, ExportHeader, NewFork, NewImport, Restoration
from perdure.store.runs import NewRun
from perdure.store.values import Attempt, Commit, NewSession, SlotWrite
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab

from .sample import paths_of

Events = dict[str, list[Any]]

_AT = "2026-01-01T00:00:00.000Z"
_FAILED = Failure(code="STEP_TIMEOUT", message="The step did not end in time.", details={"errorId": "e"})
_RESULT = {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}
_CALLS = {"pay": {"amount": 3}, "add": {"sku": "tea"}, "fail": {}}


class _Talkative:
    """Thinks, says something, and calls all tools. Its first attempt breaks off; later it answers at once."""

    def __init__(self) -> None:
        self._attempts = 0

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply]:
        self._attempts += 1
        yield ReasoningDelta("Tea?")
        yield TextDelta("Tea.")
        if self._attempts == 1:
            raise ModelFailed("The line is down.", transient=True)
        wanted = _CALLS if self._attempts == 2 else {}
        calls = [ToolCallPart(name, given, tool_call_id=f"call_{name}") for name, given in wanted.items()]
        for each in calls:
            yield ToolInputDelta(each.tool_call_id, each.tool_name, "{}")
        response = ModelResponse(
            parts=[ThinkingPart("Tea?"), TextPart("Tea."), *calls],
            usage=RequestUsage(input_tokens=10, output_tokens=5),
            model_name="provider-model",
        )
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))


@tool(approval="always", summary=lambda arguments: f"Pay {arguments['amount']}", expires=timedelta(hours=1))
def pay(amount: int) -> str:
    return f"Paid {amount}."


@tool
def add(sku: str) -> dict[str, str]:
    return {"added": sku}


@tool
def fail() -> None:
    raise ValueError("no")


class _Signals:
    """Nothing runs that could be cancelled."""

    async def cancel(self, request: CancelRequest) -> bool:
        return bool(request)


async def events_of_all_types() -> Events:
    """The data of all events that happen, by their type; in each type no two of the same form."""
    found: Events = {}
    happenings = (_conversation, _interrupted, _steered, _overflowed, _compacted, _restored, _task, _failed_task)
    for happen in (*happenings, _planned, _delegated, _ran):
        for type, data in (await happen()).items():
            kept = found.setdefault(type, [])
            for each in data:
                if paths_of(each) not in map(paths_of, kept):
                    kept.append(each)
    return found


class _BreakingOff:
    """Begins a reply, which never ends."""

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply]:
        yield TextDelta("Tea")
        await asyncio.Event().wait()


async def _interrupted() -> Events:
    async with lab(_BreakingOff(), on_interrupted_reply="continue") as it:
        delivery = await it.deliver("Tea, please")
        attempt = asyncio.create_task(it.model(delivery, generation=1))
        while "message.appended" not in await it.types():
            await asyncio.sleep(0.005)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        it.models.now = ScriptedModel(["."])
        await it.model(delivery, generation=2)
        return await _data(it)


_LARGE = State("large", str)


@tool
async def write_much(ctx: ToolContext) -> None:
    await _LARGE.set(ctx, "x" * LARGEST_SNAPSHOT)


@tool
def mark(ctx: ToolContext) -> str:
    ctx.checkpoint("half")
    return "ok"


async def _planned() -> Events:
    calls = [
        call("planning_setup_plan", objective="Tea", initial_steps=["Water", "Leaves"]),
        call("planning_update_step", step_id=1, status="done"),
        call("mark"),
        call("write_much"),
        call("planning_update_step", step_id=2, status="done"),
    ]
    async with lab([calls, "Done."], write_much, mark, planning=Planning()) as it:
        for ref in await it.calls(await it.deliver("Tea, please")):
            await it.tool(ref)
        await it.model(step=1)
        await it.store.commit(Commit(SESSION, slots=[SlotWrite(_LARGE.name, {"value": 1})]))
        await discard_unreadable(it.store, replace(it.agent, on_unreadable="fresh"), SESSION)
        [*_, first] = await it.store.checkpoints.list(SESSION, 10)
        await it.store.checkpoints.roll_back(Rollback(SESSION, first.checkpoint_id))
        return await _data(it)


async def _conversation() -> Events:
    async with lab(_Talkative(), pay, add, fail, can_ask=True) as it:
        delivery = await it.deliver("Tea, please")
        with contextlib.suppress(ModelFailed):
            await it.model(delivery, generation=1)
        # The first attempt has sent deltas, which the second one replaces.
        outcome = await it.model(delivery, generation=2)
        assert isinstance(outcome, Calls)
        for ref in outcome.calls:
            await it.tool(ref)
        (asked,) = outcome.open
        await it.park(outcome.open)
        await it.harness.remind(Reminder(session_id=SESSION, request_id=asked.request_id, left=1))
        answer = InputAnswer(option_id=APPROVE, text="Yes", reason="It is cheap.", principal_id="ada", at=_AT)
        answered = await it.answer((asked, answer))
        for approved in (await it.resume(answered, open=[asked])).calls:
            await it.run_approved(approved)
        await it.model(answered, turn=1)

        await it.attend(Attention(code="AGENT_GONE", message="No longer served."))
        await it.attend(None)
        await it.conclude(_FAILED, await it.deliver("Again"), turn=2)
        cancelled = await it.deliver("Stop")
        await cancel_turn(it.store, cast(Any, _Signals()), SESSION, None)
        await it.cancel(cancelled, turn=3)
        refused = await it.deliver("Late")
        refusal = Refusal(session_id=SESSION, delivery_id=refused.id, code="session_not_active", message="Replaced.")
        await it.harness.refuse_delivery(refusal)
        await it.harness.rebuild_session(RebuildSession(session_id=SESSION, reason="WORKFLOW_LOST"), Attempt(9, 9))
        await it.store.fork(NewFork("fork", "token of the fork", SESSION, 0))
        await it.store.fork(NewFork("half", "token of the half", SESSION, 0, step=0, cut=cut_after(0, 0)))
        header = ExportHeader(
            export_id="exp_1",
            exported_at=_AT,
            agent="lab",
            mode="conversation",
            capabilities=Capabilities(),
            principal=LOCAL,
            turns=1,
        )
        export = Export(Path(os.devnull), header, (), "")
        await it.store.import_session(NewImport("import", "token of the import", export, LOCAL))
        await it.harness.close_session(CloseSession(session_id=SESSION, failure=OPERATOR_FAILED))
        return await _data(it, "fork", "half", "import")


async def _steered() -> Events:
    async with lab([call("add", sku="tea"), "Done."], add) as it:
        (ref,) = await it.calls(await it.deliver("Add"))
        await it.steer("Stop")
        await it.tool(ref)
        await it.model(step=1)
        return await _data(it)


async def _overflowed() -> Events:
    async with lab(["Done."]) as it:
        await it.model(await it.deliver("Hi"))
        await it.deliver("One")
        body = DeliveryBody(message="Two").model_dump(mode="json")
        two = NewDelivery(SESSION, "two", body, LOCAL.owner, limit=1, overflow="summarize", mode="followup")
        await it.store.accept(two)
        return await _data(it)


async def _task() -> Events:
    async with lab([call("final_output", sku="tea")], mode="task") as it:
        await it.model(await it.deliver("What?", output_schema=_RESULT))
        return await _data(it)


async def _failed_task() -> Events:
    async with lab([ModelFailed("No.", errorId="e")], mode="task") as it:
        await it.model(await it.deliver("What?"))
        return await _data(it)


async def _delegated() -> Events:
    helper = Agent("helper", description="Finds things out.")
    asks = ScriptedModel([call("helper", message="Where is it?"), "Found.", "It is here."])
    async with lab(asks, subagents=[helper]) as it:
        delegated = await it.model(await it.deliver("Find it"))
        assert isinstance(delegated, Delegated)
        at = Coordinates(session_id=SESSION, turn=0, step=0)
        _, (child,) = await it.harness.children.dispatch(DispatchChildren(at=at))
        begin = Coordinates(session_id=child.session.session_id, turn=0, step=0)
        task = ModelCall(at=begin, agent="helper", mode="task", capabilities=Capabilities(), deliveries=(child.task,))
        await it.harness.call_model(task, Attempt(1, 1))
        (report,) = await it.store.unread(SESSION)
        result = DeliveryRef.model_validate(report.ref)
        await it.harness.children.collect(CollectChildren(at=at, deliveries=(result,)))
        await it.model(turn=0, step=1)
        return await _data(it, child.session.session_id)


class _Drivers:
    """Nothing runs that could be signalled."""

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        return bool(session and ref)

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool:
        return bool(row) or unsignalled

    async def cancel(self, request: CancelRequest) -> bool:
        return bool(request)


def _refuse() -> None:
    raise ValueError("no")


async def _work(ctx: RunContext, input: Any) -> Any:
    ctx.log("info", "It begins.", number=1)
    ctx.log("info", "It goes on.")
    try:
        await ctx.step("refuse", _refuse)
    except RunStepFailed:
        await ctx.step("sum", sum, [1, 2])
    match input:
        case "waits":
            await asyncio.gather(ctx.sleep(3600), ctx.ask("Which?", ["one"]))
        case "asks":
            await ctx.ask("What?")
        case "fails":
            raise ValueError("no")
        case _:
            pass
    return 3


async def _ran() -> Events:
    """Runs that end in each way, one after the other."""
    async with lab([]) as it:
        runs = RunRegistry([Run("work", _work)])
        runner = RunRunner(it.store, runs, AgentRegistry([Agent("helper")]), it.harness.children, it.harness.report)
        leaving = asyncio.Event().wait
        for input in ("waits", "asks", "fails", "ends"):
            principal, new = LOCAL, NewRun("work", input)
            await it.store.create_session(NewSession(input, "work", "task", f"run/{input}", principal, run=new))
            looked = await runner.look(RunBody(session_id=input), Attempt(1, 1), _Drivers(), leaving)
            if not looked.ended:
                await it.store.cancel(input, None, cancel_requested)
                await runner.look(RunBody(session_id=input), Attempt(1, 2), _Drivers(), leaving)
        return await _data(it, "waits", "asks", "fails", "ends")


async def _compacted() -> Events:
    full = ModelResponse(parts=[TextPart("word " * 200)], usage=RequestUsage(input_tokens=950), finish_reason="stop")
    found: Events = {}
    for summary in ("Summary", ModelFailed("No.")):
        async with lab([full, summary, "Done."], compaction=Compaction(context_window=1_000)) as it:
            for turn in range(2):
                await it.model(await it.deliver("word " * 200), turn=turn)
            await it.control(CLEAR, 2)
            for type, data in (await _data(it)).items():
                found.setdefault(type, []).extend(data)
    return found


async def _restored() -> Events:
    async with lab(["Yes."] * 3) as it:
        for turn in range(3):
            await it.model(await it.deliver("Well?"), turn=turn)
        for kept in (0, None):
            await it.store.restore(Restoration(SESSION, "OPERATOR", kept))
        return await _data(it)


async def _data(it: Lab, *more: str) -> Events:
    found: Events = {}
    for session_id in (SESSION, *more):
        for event in await it.store.events(session_id):
            found.setdefault(event.type, []).append(event.data)
    return found
