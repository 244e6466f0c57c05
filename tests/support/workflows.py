"""Real workflows on a real server, over activities that a test scripts."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

import worker as composition
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import (
    AttendSession,
    CloseSession,
    CollectChildren,
    Concluded,
    Conclusion,
    DispatchChildren,
    Finished,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Pending,
    ProgramOutcome,
    RebuildSession,
    Refusal,
    Reminder,
    Resumed,
    ResumeTurn,
    ShowInputs,
    ShownInputs,
    StopChildren,
    ToolCall,
    ToolOutcome,
    Withdrawal,
)
from perdure.protocol.runs import RunBody, RunLooked, RunState
from perdure.protocol.wire import JsonObject
from perdure.runtime.connect import temporal_client
from perdure.session.state import SessionState
from perdure.settings import Settings
from tests.support.processes import PATIENCE
from tests.support.stack import TemporalServer
from workflows.run import RunWorkflow
from workflows.session import SessionWorkflow
from workflows.turn import TurnWorkflow

#: A query is a task for a worker.
_PAUSE = 0.05

Answer = Callable[[ModelCall], Awaitable[ModelOutcome]]
Act = Callable[[ToolCall], Awaitable[ToolOutcome | None]]


async def wait_beating(event: asyncio.Event) -> None:
    """Wait in an activity for as long as a test takes, with the heartbeats that the product's activities send."""
    while not event.is_set():
        activity.heartbeat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await event.wait()


async def finishes(call: ModelCall) -> ModelOutcome:
    del call
    return Finished()


async def acts(call: ToolCall) -> None:
    del call


class Outside:
    """Replaces the harness: returns what the test wants, and remembers its requests."""

    def __init__(self) -> None:
        self.answer: Answer = finishes
        self.act: Act = acts
        self.model_calls: list[ModelCall] = []
        self.tool_calls: list[ToolCall] = []
        self.concluded: list[Conclusion] = []
        self.refused: list[Refusal] = []
        self.resumptions: list[ResumeTurn] = []
        self.parks: list[ParkTurn] = []
        self.withdrawals: list[Withdrawal] = []
        self.reminders: list[Reminder] = []
        self.attended: list[AttendSession] = []
        self.closed: list[CloseSession] = []
        self.rebuilt: list[RebuildSession] = []
        self.rebuilds: JsonObject | None = None
        self.dispatched: list[DispatchChildren] = []
        self.stopped: list[StopChildren] = []
        self.collected: list[CollectChildren] = []
        self.shown: list[ShowInputs] = []
        # The actions of children without a result, and what they ask people.
        self.pending: tuple[str, ...] = ()
        self.asked = ShownInputs()
        # What each activity of this name waits for before it does its work.
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.concluding_fails: list[Exception] = []
        self.concluded_as: Concluded | None = None
        self.resumed = Resumed()
        # What becomes of programs, one stage after the other.
        self.programs: list[ProgramOutcome] = []
        # What becomes of a run each time that its function is entered; at last it has ended.
        self.looks: list[RunLooked | Exception] = []
        self.bodies: list[RunBody] = []
        self._moved = asyncio.Condition()

    @property
    def consumed(self) -> list[str]:
        """The deliveries that turns consumed, in order."""
        return [delivery.id for call in self.model_calls for delivery in call.deliveries]

    @activity.defn(name=names.CALL_MODEL)
    async def call_model(self, call: ModelCall) -> ModelOutcome:
        outcome = await self.answer(call)
        await self._note(self.model_calls, call)
        return outcome

    @activity.defn(name=names.CALL_TOOL)
    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        await self._note(self.tool_calls, call)
        outcome = await self.act(call)
        return outcome or ToolOutcome(call_id=call.call.call_id, status="completed")

    @activity.defn(name=names.RUN_PROGRAM)
    async def run_program(self, call: ToolCall) -> ProgramOutcome:
        return self.programs.pop(0)

    @activity.defn(name=names.PARK_PROGRAMS)
    async def park_programs(self, park: ParkTurn) -> None:
        await self._note(self.parks, park)

    @activity.defn(name=names.CONCLUDE_TURN)
    async def conclude_turn(self, conclusion: Conclusion) -> Concluded | None:
        await self._may(names.CONCLUDE_TURN)
        if self.concluding_fails:
            raise self.concluding_fails.pop()
        await self._note(self.concluded, conclusion)
        return self.concluded_as

    @activity.defn(name=names.REFUSE_DELIVERY)
    async def refuse_delivery(self, refusal: Refusal) -> None:
        await self._may(names.REFUSE_DELIVERY)
        await self._note(self.refused, refusal)

    @activity.defn(name=names.RESUME_TURN)
    async def resume_turn(self, resumption: ResumeTurn) -> Resumed:
        await self._may(names.RESUME_TURN)
        await self._note(self.resumptions, resumption)
        return self.resumed

    @activity.defn(name=names.PARK_TURN)
    async def park_turn(self, park: ParkTurn) -> None:
        await self._note(self.parks, park)

    @activity.defn(name=names.WITHDRAW_INPUTS)
    async def withdraw_inputs(self, withdrawal: Withdrawal) -> None:
        await self._may(names.WITHDRAW_INPUTS)
        await self._note(self.withdrawals, withdrawal)

    @activity.defn(name=names.REMIND)
    async def remind(self, reminder: Reminder) -> None:
        await self._may(names.REMIND)
        await self._note(self.reminders, reminder)

    @activity.defn(name=names.ATTEND_SESSION)
    async def attend_session(self, attend: AttendSession) -> None:
        await self._may(names.ATTEND_SESSION)
        await self._note(self.attended, attend)

    @activity.defn(name=names.CLOSE_SESSION)
    async def close_session(self, close: CloseSession) -> None:
        await self._note(self.closed, close)

    @activity.defn(name=names.REBUILD_SESSION)
    async def rebuild_session(self, rebuild: RebuildSession) -> JsonObject | None:
        await self._may(names.REBUILD_SESSION)
        await self._note(self.rebuilt, rebuild)
        return self.rebuilds

    @activity.defn(name=names.DISPATCH_CHILDREN)
    async def dispatch_children(self, order: DispatchChildren) -> Pending:
        await self._may(names.DISPATCH_CHILDREN)
        await self._note(self.dispatched, order)
        return Pending(keys=self.pending)

    @activity.defn(name=names.STOP_CHILDREN)
    async def stop_children(self, order: StopChildren) -> Pending:
        await self._note(self.stopped, order)
        return Pending(keys=self.pending)

    @activity.defn(name=names.COLLECT_CHILDREN)
    async def collect_children(self, order: CollectChildren) -> None:
        await self._note(self.collected, order)

    @activity.defn(name=names.SHOW_INPUTS)
    async def show_inputs(self, order: ShowInputs) -> ShownInputs:
        await self._note(self.shown, order)
        return self.asked

    @activity.defn(name=names.RUN_BODY)
    async def run_body(self, body: RunBody) -> RunLooked:
        await self._note(self.bodies, body)
        await self._may(names.RUN_BODY)
        looked = self.looks.pop(0) if self.looks else RunLooked(ended=True)
        if isinstance(looked, Exception):
            raise looked
        return looked

    @property
    def model_activities(self) -> list[Callable[..., Any]]:
        """All that the models' queue serves."""
        notes = [self.conclude_turn, self.refuse_delivery, self.withdraw_inputs, self.remind]
        notes += [self.attend_session, self.close_session, self.rebuild_session]
        notes += [self.dispatch_children, self.stop_children, self.collect_children, self.show_inputs]
        return [*self.steps, *notes]

    @property
    def steps(self) -> list[Callable[..., Any]]:
        """What the workers of drivers and turns serve."""
        return [self.call_model, self.resume_turn, self.park_turn, self.park_programs]

    async def _may(self, name: str) -> None:
        if (waits := self.before.get(name)) is not None:
            await waits()

    async def _note(self, where: list[Any], what: Any) -> None:
        async with self._moved:
            where.append(what)
            self._moved.notify_all()

    async def until(self, holds: Callable[[], bool], within: float = PATIENCE) -> None:
        async with asyncio.timeout(within), self._moved:
            await self._moved.wait_for(holds)


class Driven:
    """One session under test."""

    def __init__(self, client: Client, handle: WorkflowHandle[Any, Any], outside: Outside) -> None:
        self.client = client
        self.handle = handle
        self.outside = outside

    async def deliver(
        self,
        delivery_id: str,
        *,
        token: str = "now",
        coalesce: bool = False,
        kind: str = "message",
        at: str | None = None,
        **about: Any,
    ) -> None:
        ref = DeliveryRef(id=delivery_id, kind=kind, token_hash=token, coalesce=coalesce, at=at, **about)
        await self.handle.signal(names.DELIVER, ref.model_dump(mode="json"))

    async def parked(self) -> None:
        """Wait until the driver knows that it waits for people."""
        async with asyncio.timeout(PATIENCE):
            while not (await self.handle.query(names.DESCRIBE))["open"]:
                await asyncio.sleep(_PAUSE)

    async def idle(self) -> None:
        """Wait until the driver waits for work."""
        async with asyncio.timeout(PATIENCE):
            while not (await self.handle.query(names.DESCRIBE))["idle"]:
                await asyncio.sleep(_PAUSE)

    async def consumed(self, *delivery_ids: str) -> None:
        """Wait until turns have consumed exactly these, in this order."""
        await self.outside.until(lambda: len(self.outside.consumed) >= len(delivery_ids))
        assert self.outside.consumed == list(delivery_ids)


class Working:
    """The workers that run."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    async def stop_turns(self) -> None:
        """Leave turns without a worker."""
        for each in self._workers:
            if each.task_queue.endswith(names.TURNS_QUEUE):
                await each.shutdown()


class Bench:
    """A server, and workers that can be taken away and given back."""

    def __init__(self, client: Client, turns: str | None = None) -> None:
        """`turns`: how turns run, unless a test says it of a session."""
        self.client = client
        self.turns = turns
        self.settings = Settings(
            task_queue=f"test-{uuid.uuid4().hex[:12]}", deployment=None, build_id=None, sandbox="on"
        )

    @contextlib.asynccontextmanager
    async def working(self, outside: Outside) -> AsyncGenerator[Working]:
        workers = self._workers(outside)
        async with contextlib.AsyncExitStack() as stack:
            for each in workers:
                await stack.enter_async_context(each)
            yield Working(workers)

    def _workers(self, outside: Outside) -> list[Worker]:
        return [
            composition.workflow_worker(
                self.client, self.settings, names.SESSIONS_QUEUE, [SessionWorkflow], outside.steps
            ),
            composition.workflow_worker(self.client, self.settings, names.TURNS_QUEUE, [TurnWorkflow], outside.steps),
            composition.activity_worker(self.client, self.settings, names.MODELS_QUEUE, outside.model_activities),
            composition.activity_worker(
                self.client, self.settings, names.TOOLS_QUEUE, [outside.call_tool, outside.run_program]
            ),
            composition.workflow_worker(self.client, self.settings, names.RUNS_QUEUE, [RunWorkflow], ()),
            composition.activity_worker(self.client, self.settings, names.BODIES_QUEUE, [outside.run_body]),
        ]

    async def start(self, outside: Outside, data: Any = None, **state: Any) -> Driven:
        session_id = f"ses_{uuid.uuid4().hex}"
        if data is None:
            values = {"session_id": session_id, "agent": "demo", "token_hash": "now", "turns": self.turns, **state}
            data = SessionState.model_validate(values).model_dump(mode="json")
        handle = await self.client.start_workflow(
            names.SESSION_WORKFLOW,
            data,
            id=session_id,
            task_queue=names.queue(self.settings.task_queue, names.SESSIONS_QUEUE),
        )
        return Driven(self.client, handle, outside)

    async def start_run(self, outside: Outside) -> Driven:
        run_id = f"run_{uuid.uuid4().hex}"
        handle = await self.client.start_workflow(
            names.RUN_WORKFLOW,
            RunState(run_id=run_id).model_dump(mode="json"),
            id=run_id,
            task_queue=names.queue(self.settings.task_queue, names.RUNS_QUEUE),
        )
        return Driven(self.client, handle, outside)


@pytest.fixture
async def bench(request: pytest.FixtureRequest, temporal_server: TemporalServer) -> Bench:
    turns = getattr(request, "param", "child")
    return Bench(await temporal_client(Settings(temporal_address=temporal_server.address)), turns)


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
async def working(bench: Bench, outside: Outside) -> AsyncGenerator[None]:
    async with bench.working(outside):
        yield
