"""Try an agent without a server, a key or Temporal.

    from perdure.testing import ScriptedModel, call, play

    async def test_the_cart_is_filled() -> None:
        model = ScriptedModel([call("add_item", sku="tea"), "Added."])

        played = await play(shop, "Tea, please", model=model)

        assert played.text == "Added."
        assert played.tool_calls[0].output == "1 item"
        assert played.state(CART).items == ["tea"]

`play` runs the real harness over a store in memory: one turn for each message. Without `model` the built-in demo
model answers.
"""

import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, TypeVar, cast

from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.agents.state import State
from perdure.errors import ModelFailed, PerdureError, Structural, TokenConflict, ToolFailed
from perdure.harness.model_step import ModelStep
from perdure.harness.tool_step import ToolStep
from perdure.harness.turn_end import TurnEnd
from perdure.models.base import Delta, Model, ModelSource, Prompt, Reply, TextDelta, finish_reason, usage_of
from perdure.models.demo import DemoModel
from perdure.protocol.deliveries import DeliveryBody, DeliveryRef, Message, Mode
from perdure.protocol.events import Event, EventType
from perdure.protocol.principals import LOCAL, Principal
from perdure.protocol.requests import (
    Conclusion,
    Failure,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    TurnRequest,
)
from perdure.protocol.wire import JsonObject
from perdure.session.tokens import hashed
from perdure.session.turn import StepFailed, run_turn
from perdure.settings import Settings
from perdure.store.base import Attempt, Commit, Committed, NewDelivery, NewSession, Store, read_all
from perdure.store.open import open_store

T = TypeVar("T")


# --- the model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedCall:
    tool: str
    arguments: JsonObject
    call_id: str | None = None


def call(tool: str, /, **arguments: Any) -> ScriptedCall:
    """A tool call for a `ScriptedModel`."""
    return ScriptedCall(tool, arguments)


Line: TypeAlias = str | ScriptedCall | Sequence[str | ScriptedCall] | ModelResponse | Exception


class ScriptedModel:
    """Gives these replies in order: text, a tool call, several of both, or an exception to raise."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = list(lines)
        #: What it was asked, in order.
        self.prompts: list[Prompt] = []

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        number = len(self.prompts)
        self.prompts.append(prompt)
        if number >= len(self._lines):
            raise ModelFailed(f"The script has {len(self._lines)} replies, and one more was asked for.")
        line = self._lines[number]
        if isinstance(line, Exception):
            raise line
        response = _response(line, number)
        for part in response.parts:
            if isinstance(part, TextPart) and part.content:
                yield TextDelta(part.content)
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))


def _response(line: str | ScriptedCall | Sequence[str | ScriptedCall] | ModelResponse, number: int) -> ModelResponse:
    if isinstance(line, ModelResponse):
        return line
    pieces = [line] if isinstance(line, str | ScriptedCall) else line
    parts = [
        TextPart(piece)
        if isinstance(piece, str)
        else ToolCallPart(piece.tool, piece.arguments, tool_call_id=piece.call_id or f"call_{number}_{index}")
        for index, piece in enumerate(pieces)
    ]
    asks = any(isinstance(part, ToolCallPart) for part in parts)
    return ModelResponse(
        parts=parts,
        usage=RequestUsage(input_tokens=10, output_tokens=5),
        finish_reason="tool_call" if asks else "stop",
        model_name="scripted",
    )


class OneModel:
    """The same model under every name."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def model(self, name: str) -> Model:
        return self._model


# --- the play -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlayedCall:
    """A tool call as the readers of the stream saw it."""

    tool: str
    input: JsonObject
    output: Any
    status: str


@dataclass(frozen=True)
class Played:
    """What came of it."""

    events: tuple[Event, ...]
    _slots: dict[str, JsonObject] = field(repr=False)

    @property
    def text(self) -> str:
        """The last thing that the agent said."""
        return next((text for text in reversed(self.texts)), "")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(event.data["message"] for event in self._of(EventType.MESSAGE_COMPLETED) if event.data)

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(event.type for event in self.events)

    @property
    def tool_calls(self) -> tuple[PlayedCall, ...]:
        asked = {
            action["callId"]: action["input"]
            for event in self._of(EventType.ACTIONS_REQUESTED)
            for action in (event.data or {})["actions"]
        }
        told = [event.data or {} for event in self._of(EventType.ACTION_RESULT)]
        return tuple(
            PlayedCall(result["toolName"], asked[result["callId"]], result["output"], data["status"])
            for data in told
            for result in [data["result"]]
        )

    def state(self, slot: State[T]) -> T:
        """The value of a state slot at the end."""
        return slot.read(self._slots.get(slot.name))

    def _of(self, type: str) -> list[Event]:
        return [event for event in self.events if event.type == type]


async def play(
    agent: Agent,
    *messages: Message,
    model: Model | None = None,
    mode: Mode = "conversation",
    principal: Principal = LOCAL,
    settings: Settings | None = None,
) -> Played:
    """Run a session of this agent, one turn for each message."""
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        noting = NotingStore(store)
        stage = Stage(cast(Store, noting), AgentRegistry([agent]), OneModel(model or DemoModel()), settings)
        for number, message in enumerate(messages):
            await stage.turn(number, message, mode, principal)
        events = tuple([event async for event in read_all(store, stage.session_id)]) if messages else ()
        slots = await store.slots(stage.session_id, sorted(noting.names)) if messages else {}
    finally:
        await store.close()
    return Played(events, {name: slot.value for name, slot in slots.items()})


class NotingStore:
    """A store that remembers the names of the slots written through it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        self.names.update(write.name for write in commit.slots)
        return await self._store.commit(commit)


class Stage:
    """The steps of a turn, done in this process. Each step is tried as a tool's declaration allows, and once else."""

    def __init__(
        self, store: Store, agents: AgentRegistry, models: ModelSource, settings: Settings | None = None
    ) -> None:
        settings = settings or Settings()
        self.session_id = "session"
        self._store = store
        self._agent = agents.default
        self._model = ModelStep(store, agents, models, settings)
        self._tool = ToolStep(store, agents, settings)
        self._end = TurnEnd(store, agents)
        self._generations = count(1)
        self._token = hashed("token")

    async def turn(self, number: int, message: Message, mode: Mode, principal: Principal) -> None:
        delivery = NewDelivery(
            session_id=self.session_id,
            delivery_id=f"delivery-{number}",
            body=DeliveryBody(message=message, principal=principal).model_dump(mode="json"),
            owner=principal.owner,
        )
        if number == 0:
            await self._store.create_session(
                NewSession(self.session_id, self._agent.name, mode, self._token, principal), delivery
            )
        else:
            await self._store.accept(delivery)
        ref = DeliveryRef(id=delivery.delivery_id, token_hash=self._token)
        request = TurnRequest(
            session_id=self.session_id, turn=number, agent=self._agent.name, mode=mode, deliveries=(ref,)
        )
        await run_turn(request, self)

    async def call_model(self, call: ModelCall) -> ModelOutcome:
        try:
            return await self._model.run(call, self._attempt(1))
        except PerdureError as error:
            raise _step_failed(error) from error

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        try:
            for number in range(1, call.call.attempts):
                try:
                    return await self._tool.run(call, self._attempt(number), threading.Event())
                except ToolFailed:
                    continue
            return await self._tool.run(call, self._attempt(call.call.attempts), threading.Event())
        except PerdureError as error:
            raise _step_failed(error) from error

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        raise _nobody_answers()

    async def park(self, park: ParkTurn) -> None:
        raise _nobody_answers()

    async def conclude(self, conclusion: Conclusion) -> None:
        await self._end.conclude(conclusion)

    def out_of_breath(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def _attempt(self, number: int) -> Attempt:
        return Attempt(number, next(self._generations))


def _nobody_answers() -> StepFailed:
    return StepFailed(Failure(code="NOBODY_ANSWERS", message="A played session has nobody to wait for."))


def _step_failed(error: PerdureError) -> StepFailed:
    structural = isinstance(error, Structural | TokenConflict)
    return StepFailed(Failure(code=error.code, message=error.message, structural=structural))
