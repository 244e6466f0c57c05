"""Where a scenario is played: a session on a real server, with workers in place of the harness."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from temporalio import activity
from temporalio.client import Client, WorkflowHandle, WorkflowHistory

from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import CallRef, Calls, Finished, ModelCall, ModelOutcome, ToolCall
from tests.support.processes import PATIENCE
from tests.support.workflows import Bench, Driven, Outside, Working
from tests.workflows.story import UNDECIDED, attributes, contains, kind, story

ASKED = OpenInput(request_id="inp_1")


class Gate:
    """Holds each caller until it is opened."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self) -> None:
        self._reached.set()
        await self._open.wait()

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), PATIENCE)

    def open(self) -> None:
        self._open.set()


async def hangs() -> None:
    """Work that continues until it is cancelled."""
    while True:
        activity.heartbeat()
        await asyncio.sleep(0.05)


def calls(count: int, **more: Any) -> Calls:
    """A step that asks for so many tools."""
    return Calls(calls=tuple(CallRef(call_id=f"c{number}", tool="act") for number in range(count)), **more)


class Scripted:
    """Says what was written down for a turn and a step, and finishes all other turns."""

    def __init__(self, script: Mapping[tuple[int, int], ModelOutcome | Exception]) -> None:
        self._script = script

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        said = self._script.get((call.at.turn, call.at.step), Finished())
        if isinstance(said, Exception):
            raise said
        return said


class Unstoppable:
    """The first turn's first answer comes once its gate is opened, whatever is requested by then."""

    def __init__(self, said: ModelOutcome) -> None:
        self.gate = Gate()
        self._said = said

    async def __call__(self, call: ModelCall) -> ModelOutcome:
        if (call.at.turn, call.at.step) != (0, 0):
            return Finished()
        await self.gate()
        return self._said


class Stage:
    """One scenario's session, its workers, and what has happened so far."""

    def __init__(self, client: Client, stack: contextlib.AsyncExitStack) -> None:
        self.client = client
        self.bench = Bench(client)
        self.outside = Outside()
        self._stack = stack
        self.started: WorkflowHandle[Any, Any] | None = None

    async def work(self) -> Working:
        return await self._stack.enter_async_context(self.bench.working(self.outside))

    async def start(self, *, attended: bool = True, data: Any = None, **state: Any) -> Driven:
        """Start the session; without workers as yet when it is not attended."""
        if attended:
            await self.work()
        session = await self.bench.start(self.outside, data, **state)
        self.started = session.handle
        return session

    async def start_run(self) -> Driven:
        """Start a run."""
        await self.work()
        run = await self.bench.start_run(self.outside)
        self.started = run.handle
        return run

    def script(self, script: Mapping[tuple[int, int], ModelOutcome | Exception]) -> None:
        self.outside.answer = Scripted(script)

    def tools(self, act: Callable[[ToolCall], Awaitable[Any]]) -> None:
        self.outside.act = act

    def hold(self, name: str) -> Gate:
        """Have this activity wait at a gate."""
        self.outside.before[name] = gate = Gate()
        return gate

    async def until(self, *words: str, part: str = "") -> None:
        """Wait until a history contains this."""
        async with asyncio.timeout(PATIENCE):
            while not contains(story_of(await self.histories(), part), words):
                await asyncio.sleep(0.05)

    async def settled(self) -> None:
        """Wait until no decision is due."""
        async with asyncio.timeout(PATIENCE):
            while not all(is_settled(each) for each in (await self.histories()).values()):
                await asyncio.sleep(0.05)

    async def histories(self) -> dict[str, WorkflowHistory]:
        """All runs that there are, by the name of the part that each plays."""
        assert self.started is not None
        return await runs(self.client, self.started.id, self.started.first_execution_run_id)


def is_settled(history: WorkflowHistory) -> bool:
    return kind(history.events[-1]) not in UNDECIDED


def story_of(histories: Mapping[str, WorkflowHistory], part: str) -> list[str]:
    return story(histories[part]) if part in histories else []


async def runs(client: Client, workflow_id: str, run_id: str | None) -> dict[str, WorkflowHistory]:
    """A driver's runs, and those of all its turns: `""`, `run-1`, `turn-0`, `turn-0-run-1`, …"""
    found: dict[str, WorkflowHistory] = {}
    turns: dict[str, list[str]] = {}
    for number, history in enumerate(await _chain(client, workflow_id, run_id)):
        found[f"run-{number}" if number else ""] = history
        for event in history.events:
            if kind(event) == "CHILD_WORKFLOW_EXECUTION_STARTED":
                child = attributes(event).workflow_execution
                turns.setdefault(child.workflow_id, []).append(child.run_id)
    for child_id, run_ids in turns.items():
        name = f"turn-{child_id.rpartition('/')[2]}"
        chains = [history for each in run_ids for history in await _chain(client, child_id, each)]
        for number, history in enumerate(chains):
            found[f"{name}-run-{number}" if number else name] = history
    return found


async def _chain(client: Client, workflow_id: str, run_id: str | None) -> list[WorkflowHistory]:
    chain: list[WorkflowHistory] = []
    while True:
        history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        chain.append(history)
        last = history.events[-1]
        if kind(last) != "WORKFLOW_EXECUTION_CONTINUED_AS_NEW":
            return chain
        run_id = attributes(last).new_execution_run_id


Play: TypeAlias = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """Something that sessions do, and what the history of each of its parts must contain, in this order."""

    name: str
    play: Play
    shows: Mapping[str, tuple[str, ...]]
    # Played on a server that wants runs renewed after a few events.
    brief: bool = False

    def recordings(self) -> dict[str, tuple[str, ...]]:
        """What is to be seen in each recording, by the name of its file without the label."""
        return {f"{self.name}-{part}" if part else self.name: shows for part, shows in self.shows.items()}


class Table:
    """The scenarios of one module."""

    def __init__(self) -> None:
        self.scenarios: list[Scenario] = []

    def add(self, shows: Mapping[str, tuple[str, ...]], *, brief: bool = False) -> Callable[[Play], Play]:
        def added(play: Play) -> Play:
            name = getattr(play, "__name__").replace("_", "-")  # noqa: B009
            self.scenarios.append(Scenario(name, play, shows, brief))
            return play

        return added
