"""Parked work, the whole way: driver, turns, activities and harness on a real server, people played by the test."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure import Agent, AgentRegistry, tool
from perdure.harness.turn_begin import HistoryCache
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, Capabilities, DeliveryBody, DeliveryRef, Mode
from perdure.protocol.inputs import InputAnswer
from perdure.runtime.connect import temporal_client
from perdure.session.inputs import resolved
from perdure.session.state import SessionState
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.follow import read_all
from perdure.store.inputs import Answering, InputQuery, InputRow, Vote
from perdure.store.open import open_store
from perdure.store.values import NewSession
from perdure.testing import OneModel, ScriptedModel, call
from tests.support.lab import YES
from tests.support.processes import PATIENCE
from tests.support.stack import TemporalServer
from tests.support.tools import pay
from worker import workers


@tool(name="pay", approval="always", expires=1)
def pay_soon(amount: int) -> str:
    raise AssertionError("this must not run")


STARTED = asyncio.Event()


@tool
async def hang() -> None:
    STARTED.set()
    await asyncio.Event().wait()


class Live:
    """One session on a server, read and written through its store."""

    def __init__(self, client: Client, store: Store, settings: Settings) -> None:
        self.id = f"ses_{uuid.uuid4().hex}"
        self._client = client
        self._store = store
        self._settings = settings
        self._handle: WorkflowHandle[Any, Any] | None = None

    async def begin(self, message: str, mode: Mode = "conversation") -> None:
        can = Capabilities(request_input=True)
        body = DeliveryBody(message=message).model_dump(mode="json")
        session = NewSession(self.id, "tester", mode, f"token-{self.id}", LOCAL, can)
        await self._store.create_session(session, NewDelivery(self.id, "first", body, LOCAL.owner))
        ref = DeliveryRef(id="first", token_hash=session.token_hash)
        state = SessionState(
            session_id=self.id,
            agent="tester",
            mode=mode,
            capabilities=can,
            token_hash=session.token_hash,
            inbox=(ref,),
        )
        self._handle = await self._client.start_workflow(
            names.SESSION_WORKFLOW,
            state.model_dump(mode="json"),
            id=self.id,
            task_queue=names.queue(self._settings.task_queue, names.SESSIONS_QUEUE),
        )

    async def signal(self, name: str, data: Any) -> None:
        assert self._handle is not None
        await self._handle.signal(name, data)

    async def ended(self) -> None:
        """Wait until the driver has nothing left to do."""
        assert self._handle is not None
        async with asyncio.timeout(PATIENCE):
            await self._handle.result()

    async def answer(self, answer: InputAnswer) -> None:
        asked = await self.asked()
        body = DeliveryBody(kind="answer", answers=tuple(row.request.request_id for row in asked))
        delivery = NewDelivery(self.id, "answer", body.model_dump(mode="json"), LOCAL.owner)
        votes = [Vote(row.request.request_id, answer) for row in asked]
        answering = Answering(self.id, votes, delivery)
        await self._store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))
        ref = DeliveryRef(id="answer", kind="answer", token_hash="whatever")
        await self.signal(names.DELIVER, ref.model_dump(mode="json"))

    async def asked(self) -> list[InputRow]:
        return list((await self._store.inputs(InputQuery(session_id=self.id))).rows)

    async def types(self) -> list[str]:
        return [event.type async for event in read_all(self._store, self.id)]

    async def until(self, type: str, times: int = 1) -> list[str]:
        """Wait until an event has been emitted so many times; the types of all events."""
        async with asyncio.timeout(PATIENCE), self._store.watch(self.id) as watch:
            while (types := await self.types()).count(type) < times:
                await watch.changed()
            return types


@contextlib.asynccontextmanager
async def live(server: TemporalServer, *tools: Any, lines: list[Any]) -> AsyncGenerator[Live]:
    settings = Settings(temporal_address=server.address, task_queue=f"test-{uuid.uuid4().hex[:12]}", agents="")
    client = await temporal_client(settings)
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    agents = AgentRegistry([Agent("tester", tools=tools)])
    models: Any = OneModel(ScriptedModel(lines))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        for each in workers(client, store, agents, models, settings):
            await stack.enter_async_context(each)
        yield Live(client, store, settings)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    STARTED.clear()


async def test_an_approval_wakes_the_session_and_its_call_runs(temporal_server: TemporalServer) -> None:
    async with live(temporal_server, pay, lines=[call("pay", amount=5), "Paid."]) as it:
        await it.begin("Pay")
        assert "action.result" not in await it.until("session.waiting")

        await it.answer(YES)

        types = await it.until("session.waiting", 2)
        assert types[types.index("input.resolved") + 1 :][:3] == ["turn.started", "action.result", "step.started"]


async def test_a_session_is_read_ahead_when_a_worker_begins_to_serve_it(
    temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[str] = []
    real = HistoryCache.read_ahead

    def noted(self: HistoryCache, session_id: str) -> Any:
        ahead.append(session_id)
        return real(self, session_id)

    monkeypatch.setattr(HistoryCache, "read_ahead", noted)
    async with live(temporal_server, lines=["Hello."]) as it:
        await it.begin("Hi")
        await it.until("session.waiting")

        # By its driver and by its turn: another worker may serve that.
        assert ahead == [it.id, it.id]


async def test_silence_has_its_consequence_by_itself(temporal_server: TemporalServer) -> None:
    async with live(temporal_server, pay_soon, lines=[call("pay", amount=5), "Then not."]) as it:
        await it.begin("Pay")

        types = await it.until("session.waiting", 2)

        assert types[types.index("input.resolved") + 1 :][:2] == ["turn.started", "action.result"]
        assert "message.completed" in types
        assert await it.asked() == []


async def test_a_parked_session_can_be_cancelled_and_takes_a_message(temporal_server: TemporalServer) -> None:
    async with live(temporal_server, pay, lines=[call("pay", amount=5), "Well."]) as it:
        await it.begin("Pay")
        await it.until("session.waiting")

        await it.signal(names.CANCEL, {})

        types = await it.until("session.waiting", 2)
        assert types[-4:] == ["input.resolved", "action.result", "turn.cancelled", "session.waiting"]


async def test_a_cancel_ends_a_parked_task(temporal_server: TemporalServer) -> None:
    async with live(temporal_server, pay, lines=[call("pay", amount=5)]) as it:
        await it.begin("Pay", mode="task")
        await it.until("session.waiting")

        await it.signal(names.CANCEL, {})

        await it.ended()
        assert (await it.types())[-1] == "session.failed"


async def test_a_running_tool_is_cancelled_before_the_event(temporal_server: TemporalServer) -> None:
    async with live(temporal_server, hang, lines=[call("hang"), "Never."]) as it:
        await it.begin("Go")
        async with asyncio.timeout(PATIENCE):
            await STARTED.wait()

        await it.signal(names.CANCEL, {})

        types = await it.until("session.waiting")
        assert types[-4:] == ["action.result", "step.completed", "turn.cancelled", "session.waiting"]
