"""A session in memory, played attempt by attempt."""

import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from perdure import Agent, AgentRegistry
from perdure.harness.harness import Harness
from perdure.models.base import Model
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, Bounds, Capabilities, DeliveryBody, DeliveryRef, Message, Mode
from perdure.protocol.events import Event, EventType, NewEvent
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, OpenInput
from perdure.protocol.requests import (
    ApprovedCall,
    AttendSession,
    Attention,
    CallRef,
    Calls,
    Conclusion,
    Coordinates,
    Failure,
    ModelCall,
    ModelOutcome,
    Parked,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    Withdrawal,
)
from perdure.protocol.wire import JsonObject
from perdure.session.decisions import CANCELLED
from perdure.session.inputs import resolved
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, NewDelivery
from perdure.store.follow import read_all
from perdure.store.inputs import Answering, Vote
from perdure.store.open import open_store
from perdure.store.values import Attempt, NewSession
from perdure.testing import ScriptedModel

SESSION = "s1"

YES = InputAnswer(option_id=APPROVE, principal_id="ada")
NO = InputAnswer(option_id=DENY, principal_id="ada")

#: What a turn without tools emits.
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


class ActiveModel:
    """The model of the moment, under every name."""

    def __init__(self, model: Model) -> None:
        self.now = model

    def model(self, name: str) -> Model:
        return self.now


class Lab:
    """Plays what workers do. Each call is an attempt; `generation` says whose turn it is."""

    def __init__(
        self, store: Store, agent: Agent, model: Model, mode: Mode, settings: Settings, session: str = SESSION
    ) -> None:
        self.session = session
        self.token = "first-token" if session == SESSION else f"token of {session}"
        self.store = store
        self.mode: Mode = mode
        self.agent = agent
        self.models = ActiveModel(model)
        self.settings = settings
        self.harness = self.worker()
        self.can_ask = False
        self.parent: JsonObject | None = None
        self.bounds: Bounds | None = None
        self._deliveries = 0

    @property
    def registry(self) -> AgentRegistry:
        return AgentRegistry([self.agent])

    def worker(self, store: Store | None = None, **parts: Any) -> Harness:
        """Another process that serves the same agent."""
        return Harness(store or self.store, self.registry, self.models, self.settings, **parts)

    def redeclare(self, *tools: Any) -> None:
        """A newer build of the same agent."""
        self.agent = replace(self.agent, tools=tools)
        self.harness = self.worker()

    async def steer(self, message: Message) -> DeliveryRef:
        return await self.deliver(message, queue_mode="steer")

    async def deliver(self, message: Message | None, *, queue_mode: str = "followup", **body: Any) -> DeliveryRef:
        number, self._deliveries = self._deliveries, self._deliveries + 1
        made = DeliveryBody(message=message, **body).model_dump(mode="json")
        delivery = NewDelivery(self.session, f"d{number}", made, LOCAL.owner, mode=queue_mode)
        if number == 0:
            await self.store.create_session(
                NewSession(
                    self.session,
                    self.agent.name,
                    self.mode,
                    self.token,
                    LOCAL,
                    Capabilities(request_input=True),
                    parent=self.parent,
                    bounds=self.bounds,
                ),
                delivery,
            )
        else:
            await self.store.accept(delivery)
        return DeliveryRef(id=delivery.delivery_id, kind=body.get("kind", "message"), token_hash=self.token)

    async def control(self, kind: str, turn: int, *, generation: int = 1) -> ModelOutcome:
        """Deliver a control and carry it out."""
        return await self.model(await self.deliver(None, kind=kind), turn=turn, generation=generation)

    async def model(
        self,
        *deliveries: DeliveryRef,
        turn: int = 0,
        step: int = 0,
        generation: int = 1,
        number: int | None = None,
        deaths: int = 0,
    ) -> ModelOutcome:
        call = ModelCall(
            at=Coordinates(session_id=self.session, turn=turn, step=step),
            agent=self.agent.name,
            mode=self.mode,
            capabilities=Capabilities(request_input=self.can_ask),
            deliveries=deliveries,
        )
        return await self.harness.call_model(call, Attempt(number or generation, generation, deaths))

    async def tool(
        self,
        call: CallRef,
        *,
        turn: int = 0,
        step: int = 0,
        generation: int = 1,
        number: int | None = None,
        deaths: int = 0,
        cancelled: threading.Event | None = None,
    ) -> ToolOutcome:
        made = ToolCall(at=Coordinates(session_id=self.session, turn=turn, step=step), agent=self.agent.name, call=call)
        return await self.harness.call_tool(made, Attempt(number or generation, generation, deaths), cancelled)

    async def run_one(self) -> ToolOutcome:
        """Read a message, and run the one call that it leads to."""
        (ref,) = await self.calls(await self.deliver("Go"))
        return await self.tool(ref)

    async def calls(self, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> tuple[CallRef, ...]:
        outcome = await self.model(*deliveries, turn=turn, step=step)
        assert isinstance(outcome, Calls)
        return outcome.calls

    async def parked(self, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> tuple[OpenInput, ...]:
        """Ask the model, which must want nothing but what people have to agree to."""
        outcome = await self.model(*deliveries, turn=turn, step=step)
        assert isinstance(outcome, Parked)
        return outcome.open

    async def answer(self, *answers: tuple[OpenInput, InputAnswer], message: str | None = None) -> DeliveryRef:
        """What the API does when people answer."""
        number, self._deliveries = self._deliveries, self._deliveries + 1
        ids = tuple(each.request_id for each, _ in answers)
        made = DeliveryBody(kind="answer", answers=ids, message=message).model_dump(mode="json")
        votes = [Vote(each.request_id, answer) for each, answer in answers]
        delivery = NewDelivery(self.session, f"d{number}", made, LOCAL.owner)
        answering = Answering(self.session, votes, delivery, always=True)
        await self.store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))
        return DeliveryRef(id=delivery.delivery_id, kind="answer", token_hash=self.token)

    async def resume(
        self,
        *deliveries: DeliveryRef,
        open: Sequence[OpenInput] = (),
        expired: Sequence[OpenInput] = (),
        turn: int = 1,
        generation: int = 1,
    ) -> Resumed:
        resumption = ResumeTurn(
            at=Coordinates(session_id=self.session, turn=turn),
            agent=self.agent.name,
            mode=self.mode,
            deliveries=deliveries,
            open=tuple(open),
            expired=tuple(each.request_id for each in expired),
        )
        return await self.harness.resume_turn(resumption, Attempt(generation, generation))

    async def run_approved(self, approved: ApprovedCall, *, turn: int = 1, generation: int = 1) -> ToolOutcome:
        told_at = Coordinates(session_id=self.session, turn=turn)
        made = ToolCall(at=approved.at, told_at=told_at, agent=self.agent.name, call=approved.call)
        return await self.harness.call_tool(made, Attempt(generation, generation), threading.Event())

    async def park(self, open: Sequence[OpenInput], *, turn: int = 0, step: int = 0) -> None:
        at = Coordinates(session_id=self.session, turn=turn, step=step)
        await self.harness.park_turn(ParkTurn(at=at, agent=self.agent.name, mode=self.mode, open=tuple(open)))

    async def cancel(self, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> None:
        at = Coordinates(session_id=self.session, turn=turn, step=step)
        conclusion = Conclusion(kind="cancelled", at=at, mode=self.mode, failure=CANCELLED, deliveries=deliveries)
        await self.harness.conclude_turn(conclusion)

    async def attend(self, attention: Attention | None, turn: int | None = None) -> None:
        await self.harness.attend_session(AttendSession(session_id=self.session, attention=attention, turn=turn))

    async def request_cancel(self) -> CancelRequest | None:
        """What the API does when a caller cancels the turn."""

        def requested(turn: int) -> NewEvent:
            return NewEvent(type=EventType.CANCEL_REQUESTED, key=names.turn_key(turn, "cancel-requested"), turn=turn)

        return await self.store.cancel(self.session, None, requested)

    async def withdraw(self, open: Sequence[OpenInput], *, turn: int = 0) -> None:
        at = Coordinates(session_id=self.session, turn=turn)
        await self.harness.withdraw_inputs(Withdrawal(at=at, mode=self.mode, open=tuple(open)))

    async def status_of(self, request: OpenInput) -> str:
        row = await self.store.input(request.request_id)
        return row.status if row else "unknown"

    async def session_status(self) -> str:
        row = await self.store.session(self.session)
        return row.status if row else "unknown"

    async def conclude(self, failure: Failure, *deliveries: DeliveryRef, turn: int = 0, step: int = 0) -> None:
        at = Coordinates(session_id=self.session, turn=turn, step=step)
        await self.harness.conclude_turn(Conclusion(at=at, mode=self.mode, failure=failure, deliveries=deliveries))

    async def events(self) -> list[Event]:
        return [event async for event in read_all(self.store, self.session)]

    async def types(self) -> list[str]:
        return [event.type for event in await self.events()]

    async def emitted(self, type: str) -> list[dict[str, Any]]:
        return [event.data or {} for event in await self.events() if event.type == type]


@asynccontextmanager
async def lab(
    lines: Sequence[Any] | Model,
    *tools: Any,
    mode: Mode = "conversation",
    settings: Settings | None = None,
    can_ask: bool = False,
    **agent: Any,
) -> AsyncGenerator[Lab]:
    model: Any = lines if hasattr(lines, "stream") else ScriptedModel(list(lines))  # type: ignore
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        it = Lab(store, Agent("tester", tools=tools, **agent), model, mode, settings or Settings(agents=""))
        it.can_ask = can_ask
        yield it
    finally:
        await store.close()
