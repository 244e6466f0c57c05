"""A real HTTP server over a real SQLite store. Temporal is a recorder: what it was asked is the fact to test."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
from temporalio.client import Client

from api.app import create_app
from api.auth import Authenticator, build_authenticators
from api.connections import ConnectionLimits
from api.server import listen, run
from api.stream.broadcast import Broadcasts, Pace
from api.stream.stalls import Stalls
from perdure.agents import Agent, tool
from perdure.agents.registry import AgentRegistry
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, step_coordinates, turn_coordinates
from perdure.runtime.sessions import Sessions
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionChange
from tests.support.processes import PATIENCE


@tool(effects="pure")
def weather(city: str) -> str:
    """Say how the weather is.

    Args:
        city: Where.
    """
    return f"Sunny in {city}."


@tool(approval="always")
def pay(amount: int, to: str = "ada") -> str:
    """Pay somebody."""
    return f"Paid {amount} to {to}."


CONCIERGE = Agent(name="concierge", model="test:fast", instructions="Be kind.", tools=[weather], description="Helps.")
CLERK = Agent(name="clerk", instructions="Be brief.")
# One waits for its approvals; the other takes whatever is said instead for a denial.
BURSAR = Agent(name="bursar", tools=[pay])
HASTY = Agent(name="hasty", tools=[pay], while_waiting="deny")

URL = "/eve/v1/session"


@dataclass
class Recorder:
    """Stands in for Temporal's client, and remembers."""

    namespace: str = "default"
    started: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    signals: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list[tuple[str, str, dict[str, Any]]])
    failure: Exception | None = None

    async def start_workflow(self, workflow: str, state: dict[str, Any], **options: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.started.append({"workflow": workflow, "state": state, **options})

    def get_workflow_handle(self, workflow_id: str) -> "_Handle":
        return _Handle(self, workflow_id)

    async def list_workflows(self, query: str, **_: Any) -> AsyncGenerator[Any]:
        if self.failure is not None:
            raise self.failure
        for nothing in ():
            yield nothing


@dataclass
class _Handle:
    recorder: Recorder
    id: str

    async def signal(self, name: str, payload: dict[str, Any], **_: Any) -> None:
        if self.recorder.failure is not None:
            raise self.recorder.failure
        self.recorder.signals.append((self.id, name, payload))

    async def terminate(self, **_: Any) -> None:
        if self.recorder.failure is not None:
            raise self.recorder.failure
        self.recorder.signals.append((self.id, "terminate", {}))

    async def describe(self, **_: Any) -> Any:
        @dataclass
        class Found:
            run_id: str = "run-1"
            status: None = None

        return Found()


@dataclass
class Api:
    """The server under test, and its parts."""

    url: str
    http: httpx2.AsyncClient
    store: Store
    temporal: Recorder
    broadcasts: Broadcasts

    async def create(self, message: str = "hello", *, prefix: str = "", **fields: Any) -> dict[str, Any]:
        answer = await self.http.post(f"{prefix}{URL}", json={"message": message, **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()

    async def deliver(
        self, session: dict[str, Any], message: str = "more", *, key: str | None = None, **fields: Any
    ) -> httpx2.Response:
        body = {"continuationToken": session["continuationToken"], "message": message, **fields}
        headers = {} if key is None else {"idempotency-key": key}
        return await self.http.post(f"{URL}/{session['sessionId']}", json=body, headers=headers)

    @asynccontextmanager
    async def stream(self, session_id: str, start: int | str = 0) -> AsyncGenerator["Reading"]:
        async with self.http.stream(
            "GET", f"{URL}/{session_id}/stream", params={"startIndex": start}, timeout=PATIENCE
        ) as answer:
            yield Reading(answer)

    async def emit(self, session_id: str, *events: NewEvent, change: SessionChange | None = None) -> None:
        """Append events, as an activity would."""
        await self.store.commit(Commit(session_id=session_id, events=events, change=change))


class Reading:
    """An open stream, read line by line."""

    def __init__(self, answer: httpx2.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def line(self) -> str:
        return await asyncio.wait_for(anext(self._lines), PATIENCE)

    async def event(self) -> dict[str, Any]:
        """The next event; blank lines are skipped, as clients do."""
        while not (line := await self.line()).strip():
            pass
        return json.loads(line)

    async def events(self, count: int) -> list[dict[str, Any]]:
        return [await self.event() for _ in range(count)]

    async def rest(self) -> list[dict[str, Any]]:
        """Everything until the server ends the stream."""
        read: list[dict[str, Any]] = []
        while True:
            try:
                read.append(await self.event())
            except StopAsyncIteration:
                return read


def step(turn: int, number: int, what: str, kind: str, attempt: int = 1, **data: Any) -> NewEvent:
    return NewEvent(
        type=kind,
        key=names.step_key(turn, number, what),
        data={**data, **step_coordinates(turn, number)},
        turn=turn,
        step=number,
        attempt=attempt,
    )


def text_delta(turn: int, number: int, index: int, text: str, attempt: int = 1) -> NewEvent:
    """One piece of a streamed message."""
    return step(turn, number, f"text/{attempt}/{index}", EventType.MESSAGE_APPENDED, attempt=attempt, messageDelta=text)


def turn_events(turn: int, pieces: Sequence[str] = ("Hel", "lo"), *, deliveries: Sequence[str] = ()) -> list[NewEvent]:
    """A text turn, up to and including its boundary."""
    return [
        of_turn(turn, "started", EventType.TURN_STARTED).model_copy(update={"delivery_ids": tuple(deliveries)}),
        step(turn, 0, "started", EventType.STEP_STARTED),
        *(text_delta(turn, 0, index, piece) for index, piece in enumerate(pieces)),
        step(turn, 0, "message", EventType.MESSAGE_COMPLETED, message="".join(pieces), finishReason="stop"),
        step(turn, 0, "completed", EventType.STEP_COMPLETED, finishReason="stop"),
        of_turn(turn, "completed", EventType.TURN_COMPLETED),
        NewEvent(type=EventType.SESSION_WAITING, key=names.turn_key(turn, "waiting"), data={"wait": "next"}, turn=turn),
    ]


def of_turn(turn: int, what: str, kind: str) -> NewEvent:
    return NewEvent(type=kind, key=names.turn_key(turn, what), data=turn_coordinates(turn), turn=turn)


def session_ended() -> NewEvent:
    return NewEvent(type=EventType.SESSION_COMPLETED, key=names.session_key("completed"))


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    authenticators: Sequence[Authenticator] | None = None,
    pace: Pace | None = None,
    stalls: Callable[[Store], Stalls] | None = None,
    terms: ConnectionLimits | None = None,
    database: str | None = None,
    **settings: Any,
) -> AsyncGenerator[Api]:
    """An API on a free port of the loopback, with a few agents; on SQLite, unless `database` names another one."""
    chosen = Settings.model_validate({"data_dir": directory, "port": 0, **settings})
    store = await open_store(database or f"sqlite:///{directory / 'test.db'}")
    await store.migrate()
    temporal, broadcasts = Recorder(), Broadcasts(store, pace, stalls and stalls(store), chosen.stream_policy)
    agents = AgentRegistry([CONCIERGE, CLERK, BURSAR, HASTY])
    app = create_app(
        sessions=Sessions(store, cast("Client", temporal), secret=b"a test's secret", agents=agents),
        store=store,
        agents=agents,
        settings=chosen,
        authenticators=build_authenticators(chosen) if authenticators is None else authenticators,
        broadcasts=broadcasts,
    )
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stop, ready = asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(run(app, sock, stop, ready=ready, on_stop=broadcasts.close, limits=terms))
    await ready.wait()
    try:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE, verify=False) as http:
            yield Api(url, http, store, temporal, broadcasts)
    finally:
        stop.set()
        await server
        await store.close()
