"""A session in memory, played attempt by attempt."""

import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from perdure import Agent, AgentRegistry
from perdure.harness.model_step import ModelStep
from perdure.harness.tool_step import ToolStep
from perdure.harness.turn_end import TurnEnd
from perdure.models.base import Model
from perdure.protocol.deliveries import DeliveryBody, DeliveryRef, Message, Mode
from perdure.protocol.events import Event
from perdure.protocol.principals import LOCAL
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Conclusion,
    Coordinates,
    Failure,
    ModelCall,
    ModelOutcome,
    ToolCall,
    ToolOutcome,
)
from perdure.settings import Settings
from perdure.store.base import Attempt, NewDelivery, NewSession, Store, read_all
from perdure.store.open import open_store
from perdure.testing import ScriptedModel

SESSION = "s1"

#: What a turn without tools tells.
TEXT_TURN = [
    "session.started",
    "turn.started",
    "message.received",
    "step.started",
    "message.appended",
    "message.completed",
    "step.completed",
    "turn.completed",
    "session.waiting",
]


class Speaker:
    """The model of the moment, under every name."""

    def __init__(self, model: Model) -> None:
        self.now = model

    def model(self, name: str) -> Model:
        return self.now


class Lab:
    """Plays what workers do. Each call is an attempt; `generation` says whose turn it is."""

    def __init__(self, store: Store, agent: Agent, model: Model, mode: Mode, settings: Settings) -> None:
        self.store = store
        self.mode: Mode = mode
        self.agent = agent
        agents = AgentRegistry([agent])
        self.speaker = Speaker(model)
        self.settings = settings
        self.models = self.worker()
        self.tools = ToolStep(store, agents, settings)
        self.end = TurnEnd(store, agents)
        self._deliveries = 0

    def worker(self, store: Store | None = None, **parts: Any) -> ModelStep:
        """Another process that serves the same agent."""
        store = store or self.store
        return ModelStep(store, AgentRegistry([self.agent]), self.speaker, self.settings, **parts)

    async def deliver(self, message: Message | None, **body: Any) -> DeliveryRef:
        number, self._deliveries = self._deliveries, self._deliveries + 1
        made = DeliveryBody(message=message, **body).model_dump(mode="json")
        delivery = NewDelivery(SESSION, f"d{number}", made, LOCAL.owner)
        if number == 0:
            await self.store.create_session(
                NewSession(SESSION, self.agent.name, self.mode, "first-token", LOCAL), delivery
            )
        else:
            await self.store.accept(delivery)
        return DeliveryRef(id=delivery.delivery_id, token_hash="first-token")

    async def model(
        self, *deliveries: DeliveryRef, turn: int = 0, step: int = 0, generation: int = 1, number: int | None = None
    ) -> ModelOutcome:
        call = ModelCall(
            at=Coordinates(session_id=SESSION, turn=turn, step=step),
            agent=self.agent.name,
            mode=self.mode,
            deliveries=deliveries,
        )
        return await self.models.run(call, Attempt(number or generation, generation))

    async def tool(
        self,
        call: CallRef,
        *,
        turn: int = 0,
        step: int = 0,
        generation: int = 1,
        number: int | None = None,
        cancelled: threading.Event | None = None,
    ) -> ToolOutcome:
        made = ToolCall(at=Coordinates(session_id=SESSION, turn=turn, step=step), agent=self.agent.name, call=call)
        return await self.tools.run(made, Attempt(number or generation, generation), cancelled or threading.Event())

    async def run_one(self) -> ToolOutcome:
        """Hear a message, and run the one call that it leads to."""
        (ref,) = await self.calls(await self.deliver("Go"))
        return await self.tool(ref)

    async def calls(self, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> tuple[CallRef, ...]:
        outcome = await self.model(*deliveries, turn=turn, step=step)
        assert isinstance(outcome, Calls)
        return outcome.calls

    async def conclude(self, failure: Failure, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> None:
        at = Coordinates(session_id=SESSION, turn=turn, step=step)
        await self.end.conclude(Conclusion(at=at, mode=self.mode, failure=failure, deliveries=deliveries))

    async def events(self) -> list[Event]:
        return [event async for event in read_all(self.store, SESSION)]

    async def types(self) -> list[str]:
        return [event.type for event in await self.events()]

    async def told(self, type: str) -> list[dict[str, Any]]:
        return [event.data or {} for event in await self.events() if event.type == type]


@asynccontextmanager
async def lab(
    lines: Sequence[Any] | Model,
    *tools: Any,
    mode: Mode = "conversation",
    settings: Settings | None = None,
    **agent: Any,
) -> AsyncGenerator[Lab]:
    model: Any = lines if hasattr(lines, "stream") else ScriptedModel(list(lines))  # type: ignore
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        yield Lab(store, Agent("tester", tools=tools, **agent), model, mode, settings or Settings(agents=""))
    finally:
        await store.close()
