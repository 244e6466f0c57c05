"""`play_run`: runs the function of a run in memory, and shows its results."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import time
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.agents.run import Question, Run, RunContext, RunRegistry, RunWork
from perdure.agents.signature import problems
from perdure.agents.tool import Effects
from perdure.errors import Invalid, RunDiverged, Superseded
from perdure.harness.harness import Harness
from perdure.harness.runs.body import Body, Parked
from perdure.harness.runs.outcomes import called
from perdure.harness.runs.records import Calls, calls_of
from perdure.models.base import Model
from perdure.models.demo import DemoModel
from perdure.protocol.deliveries import LOCAL, RUN, Capabilities, DeliveryBody, DeliveryRef, Principal
from perdure.protocol.events import Event, EventType
from perdure.protocol.inputs import InputAnswer, InputRequest
from perdure.protocol.requests import TurnRequest
from perdure.protocol.runs import RunBody, RunLooked
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import resolved
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, DeliveryRow, NewDelivery
from perdure.store.follow import read_all
from perdure.store.inputs import Answering, InputQuery, Vote
from perdure.store.open import open_store
from perdure.store.runs import NewRun, RunRecord, RunStatus
from perdure.store.values import Attempt, NewSession

from .stage import Dispatched, LocalSteps, OneModel

_RUN = "run"


@dataclass(frozen=True)
class PlayedStep:
    """A call of the function that has ended."""

    name: str
    kind: Literal["step", "sleep", "prompt", "dispatch", "ask"]
    status: Literal["completed", "failed", "unknown"]
    value: Any
    error: JsonObject | None


@dataclass(frozen=True)
class PlayedRun:
    """The results of a played run so far."""

    status: RunStatus
    #: `name` and `message` of what the function has raised.
    error: JsonObject | None
    #: The calls that have ended, in their order.
    steps: tuple[PlayedStep, ...]
    #: The open questions, oldest first.
    pending: tuple[InputRequest, ...]
    waiting_for: str | None
    events: tuple[Event, ...]
    #: What it has handed to sessions, which are not played.
    dispatched: tuple[Dispatched, ...]
    _result: Any = field(repr=False)
    _play: "_Play" = field(repr=False)

    @property
    def result(self) -> Any:
        """What the function has returned, as JSON; `AssertionError` when it has not."""
        match self.status:
            case "completed":
                return self._result
            case "errored":
                error = self.error or {}
                raise AssertionError(f"The run has no result: {error.get('name')}: {error.get('message')}")
            case "active":
                raise AssertionError(f"The run has no result, it waits for {self.waiting_for}")

    @property
    def logs(self) -> tuple[tuple[str, str], ...]:
        """The level and the text of each line that the function has logged."""
        lines = [event.data or {} for event in self.events if event.type == EventType.RUN_LOG]
        return tuple((line["level"], line["message"]) for line in lines)

    async def answer(self, question: str, answer: str) -> "PlayedRun":
        """Answer a pending question, by its text or id, with one of its options or with text, and continue."""
        request = next((each for each in self.pending if question in (each.prompt, each.request_id)), None)
        if request is None:
            asked = ", ".join(f"{each.prompt!r}" for each in self.pending) or "nothing"
            raise AssertionError(f"The question {question!r} is not pending; pending: {asked}.")
        options = [option.id for option in request.options]
        if answer not in options and not request.allow_freeform:
            raise AssertionError(f"{question!r} has no option {answer!r}; it has {', '.join(map(repr, options))}.")
        given = InputAnswer(option_id=answer) if answer in options else InputAnswer(text=answer)
        return await self._play.answer(request, given)

    async def wake(self) -> "PlayedRun":
        """Let the next sleep end while questions are open, and continue."""
        if self.status != "active":
            raise AssertionError("The run has ended.")
        return await self._play.advance(wakes=True)


class _Play:
    """A run that may continue: its store stays open while questions are."""

    def __init__(
        self, store: Store, run: Run, agents: AgentRegistry, model: Model, principal: Principal, dies_in: Sequence[str]
    ) -> None:
        settings, models = Settings(), OneModel(model)
        self._store = store
        self._run = run
        self._principal = principal
        self._dies_in = set(dies_in)
        self._now = time()
        self._generations = count(1)
        self._agents = _StartedAgents()
        self._steps = LocalSteps(store, agents, models, settings)
        played = replace(run, function=self._entered)
        self._runner = Harness(
            store,
            agents,
            models,
            settings,
            runs=RunRegistry([played]),
            clock=lambda: self._now,
            dispatch=self._steps.dispatches.dispatch,
        ).runs

    async def begin(self, given: Any) -> PlayedRun:
        capabilities = Capabilities(request_input=True)
        session = NewSession(
            _RUN, self._run.name, "task", "run", self._principal, capabilities, run=NewRun(self._run.name, given)
        )
        await self._store.create_session(session, self._delivery("start", DeliveryBody(kind=RUN)))
        return await self.advance()

    async def answer(self, request: InputRequest, given: InputAnswer) -> PlayedRun:
        principal = self._principal
        whose = {"principal_id": principal.principal_id, "owner": principal.owner}
        vote = Vote(request.request_id, given.model_copy(update=whose))
        body = DeliveryBody(kind="answer", answers=(request.request_id,), principal=principal)
        answering = Answering(_RUN, [vote], self._delivery(f"answer-{request.request_id}", body))
        await self._store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))
        return await self.advance()

    async def advance(self, *, wakes: bool = False) -> PlayedRun:
        """Enter the function until the run has ended, or only people or `wakes` would let it go on."""
        try:
            while not (looked := await self._look()).ended:
                if await self._agents.play(self._store, self._steps):
                    continue
                if looked.due is None or (await self._pending() and not wakes):
                    break
                self._now = max(self._now, looked.due)
                wakes = False
            else:
                await self._check_end()
        except BaseException:
            await self._store.close()
            raise
        return await self._results()

    async def _look(self) -> RunLooked:
        while True:
            try:
                return await self._runner.look(RunBody(session_id=_RUN), self._attempt(), self._agents, _never)
            except _Died:
                continue

    async def _entered(self, ctx: RunContext, given: Any) -> Any:
        body = cast(Body, ctx._work)  # pyright: ignore[reportPrivateUsage]
        work = _Dying(body, self._dies_in)
        return await self._run.function(replace(ctx, _work=cast(RunWork, work)), given)

    async def _check_end(self) -> None:
        """Enter the function once more, as a worker does that dies before it can record the end."""
        if self._dies_in:
            names = ", ".join(repr(each) for each in sorted(self._dies_in))
            raise AssertionError(f"The run makes no step {names} in which a worker could die.")
        calls = calls_of(await self._store.records(_RUN))
        record = await self._store.run(_RUN)
        if calls.open or record is None:
            return
        # No call does anything: those that are recorded are looked up, and others stop the function.
        body = Body(self._store, _RUN, self._attempt(), calls, cast(Any, None))
        ctx = RunContext(_RUN, self._run.name, self._principal, cast(RunWork, _Recorded(body, calls)))
        given = self._run.read_input(record.input)
        if isinstance(await body.run(lambda: self._run.function(ctx, given), _never), Parked):
            raise AssertionError("A function whose calls have all ended does not wait for one.")

    async def _results(self) -> PlayedRun:
        record = cast(RunRecord, await self._store.run(_RUN))
        calls = calls_of(await self._store.records(_RUN))
        pending = await self._pending()
        events = tuple([event async for event in read_all(self._store, _RUN)])
        if record.ended:
            await self._store.close()
        error = None if record.error is None else {each: record.error.get(each) for each in ("name", "message")}
        return PlayedRun(
            record.status,
            error,
            _steps(calls),
            pending,
            record.waiting_for,
            events,
            self._steps.dispatches.all,
            record.result,
            self,
        )

    async def _pending(self) -> tuple[InputRequest, ...]:
        rows = (await self._store.inputs(InputQuery(session_id=_RUN))).rows
        return tuple(row.request for row in rows)

    def _attempt(self) -> Attempt:
        return Attempt(1, next(self._generations))

    def _delivery(self, delivery_id: str, body: DeliveryBody) -> NewDelivery:
        return NewDelivery(_RUN, delivery_id, body.model_dump(mode="json"), self._principal.owner)


def _steps(calls: Calls) -> tuple[PlayedStep, ...]:
    steps: list[PlayedStep] = []
    for position, settled in sorted(calls.settled.items()):
        kind, _, name = calls.labels[position].partition("/")
        steps.append(PlayedStep(name or kind, cast(Any, kind), settled.status, settled.value, settled.error))
    return tuple(steps)


class _StartedAgents:
    """The sessions that the run prompts. They are played one after the other, and ask nobody."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, JsonObject]] = {}

    async def start(self, session: NewSession, ref: JsonObject) -> bool:
        self._waiting[ref["id"]] = (session.session_id, ref)
        return True

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool:
        self._waiting[row.delivery_id] = (row.session_id, row.ref or {})
        return True

    async def cancel(self, request: CancelRequest) -> bool:
        return True

    async def play(self, store: Store, steps: LocalSteps) -> bool:
        """Play what was prompted; False when there is nothing."""
        prompted, self._waiting = self._waiting, {}
        for session_id, ref in prompted.values():
            row = await store.session(session_id)
            if row is not None and not row.ended:
                deliveries = (DeliveryRef.model_validate(ref),)
                await steps.run(
                    TurnRequest(
                        session_id=session_id, turn=row.turns, agent=row.agent, mode=row.mode, deliveries=deliveries
                    )
                )
        return bool(prompted)


async def _never() -> None:
    """The process of the test does not stop while it plays."""
    await asyncio.get_running_loop().create_future()


class _Died(Superseded):
    """The worker of a played attempt has died: it stops without waiting for its steps, and a newer one goes on."""


class _Work:
    """The work of a context, with some of it changed."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _Dying(_Work):
    """The worker dies in these steps, once in each: when the function has done its work, and nothing has its result."""

    def __init__(self, body: Body, dies_in: set[str]) -> None:
        super().__init__(body)
        self._dies_in = dies_in

    def step(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], effects: Effects, timeout: float
    ) -> Awaitable[Any]:
        async def dying(*given: Any) -> Any:
            result = await called(function, given, name)
            if name not in self._dies_in:
                return result
            self._dies_in.discard(name)
            self._body.stop(_Died())
            return await asyncio.get_running_loop().create_future()

        return self._body.step(name, dying, arguments, effects, timeout)


class _Recorded(_Work):
    """The calls that are recorded, and no other."""

    def __init__(self, body: Body, calls: Calls) -> None:
        super().__init__(body)
        self._labels: Mapping[int, str] = calls.labels
        self._position = 0

    def step(self, name: str, *arguments: Any) -> Awaitable[Any]:
        return self._call(f"step/{name}", lambda: self._body.step(name, *arguments))

    def sleep(self, seconds: float) -> Awaitable[None]:
        return self._call("sleep", lambda: self._body.sleep(seconds))

    def prompt(self, agent: str, *arguments: Any) -> Awaitable[Any]:
        return self._call(f"prompt/{agent}", lambda: self._body.prompt(agent, *arguments))

    def dispatch(self, agent: str, *arguments: Any) -> Awaitable[Any]:
        return self._call(f"dispatch/{agent}", lambda: self._body.dispatch(agent, *arguments))

    def ask(self, question: Question) -> Awaitable[str]:
        return self._call("ask", lambda: self._body.ask(question))

    def _call(self, what: str, call: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        if self._position not in self._labels:
            self._body.stop(
                RunDiverged(f"Call {self._position} of the function is {what} now; the run has recorded no such call.")
            )
        self._position += 1
        return call()


async def play_run(
    run: Run,
    input: Any = None,
    *,
    agents: Sequence[Agent] = (),
    model: Model | None = None,
    principal: Principal = LOCAL,
    dies_in: Sequence[str] = (),
) -> PlayedRun:
    """Play a run: its steps are done in this process, and its sleeps take no time.

    It stops at questions (`played.pending`) and continues with `played.answer`. `agents` are those that it prompts;
    `model` answers for all of them. `dies_in`: names of steps in which the worker dies once, before their result is
    recorded. The function is entered again after each wait, as by a worker, and once more at its end: `RunDiverged`
    when it makes other calls then.
    """
    given = input.model_dump(mode="json", by_alias=True) if isinstance(input, BaseModel) else input
    given = {} if given is None else given
    try:
        run.read_input(given)
    except ValidationError as invalid:
        raise Invalid(f"Invalid input for {run.name}: {problems(invalid)}") from None
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    # A registry is never empty; nobody can prompt this name.
    registry = AgentRegistry(list(agents) or [Agent("nobody-in-this-test")])
    return await _Play(store, run, registry, model or DemoModel(), principal, dies_in).begin(given)
