"""`play`: runs a session in memory, and shows its results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from perdure.agents.agent import Agent
from perdure.agents.progress.plan import PLAN, Plan
from perdure.agents.progress.slices import Slice
from perdure.agents.registry import AgentRegistry
from perdure.agents.state import State
from perdure.harness.journal import TurnJournal
from perdure.harness.tools.records import RequestedCall
from perdure.models.base import Model
from perdure.models.demo import DemoModel
from perdure.protocol.deliveries import LOCAL, Message, Mode, Principal
from perdure.protocol.events import Event, EventType
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, InputRequest, digest
from perdure.protocol.wire import JsonObject
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.open import open_store

from .stage import SESSION, Dispatched, LocalSteps, OneModel, RecordingStore, Stage, StartTerms

T = TypeVar("T")


@dataclass(frozen=True)
class PlayedCall:
    """A tool call as the readers of the stream saw it."""

    tool: str
    input: JsonObject
    output: Any
    status: str


class _Play:
    """A session that may continue: its store stays open while input requests are open."""

    def __init__(
        self, store: Store, recording: RecordingStore, stage: Stage, denies: bool, messages: Sequence[Message]
    ):
        self._store = store
        self._recording = recording
        self._denies = denies
        self._rest = list(messages)
        self._begun = False
        self.stage = stage

    async def advance(self) -> "Played":
        """Deliver the remaining messages until an input request is open, and return the results so far."""
        try:
            while self._rest and (self._denies or not await self.stage.waiting()):
                message = self._rest.pop(0)
                await (self.stage.deliver(message) if self._begun else self.stage.begin(message))
                self._begun = True
            return await self._results()
        except BaseException:
            await self._store.close()
            raise

    async def _results(self) -> "Played":
        begun = self._begun
        events = tuple([event async for event in read_all(self._store, SESSION)]) if begun else ()
        slots = await self._store.slots(SESSION, sorted(self._recording.names)) if begun else {}
        records = await self._store.records(SESSION) if begun else ()
        numbers = dict.fromkeys(record.turn for record in records)
        turns = [TurnJournal([record for record in records if record.turn == number]) for number in numbers]
        # In the order in which the model asked for them.
        calls = tuple(call for turn in turns for step in range(turn.last_step + 1) for call in turn.calls(step))
        pending = tuple(row.request for row in await self.stage.waiting())
        if not pending:
            await self._store.close()
        return Played(
            events,
            pending,
            {name: slot.value for name, slot in slots.items() if slot.value is not None},
            calls,
            self.stage.steps.dispatches.all,
            self,
        )


@dataclass(frozen=True)
class Played:
    """The results of a played session so far."""

    events: tuple[Event, ...]
    #: The open input requests, oldest first.
    pending: tuple[InputRequest, ...]
    _slots: dict[str, JsonObject] = field(repr=False)
    _calls: tuple[RequestedCall, ...] = field(repr=False)
    #: What its tools have handed to other sessions.
    dispatched: tuple[Dispatched, ...]
    _play: _Play = field(repr=False)

    async def answer(
        self,
        request: str,
        answer: str,
        *,
        arguments: JsonObject | None = None,
        reason: str | None = None,
        by: Principal | None = None,
    ) -> "Played":
        """Answer a pending request, by its id or by the name of its tool, and continue.

        The answer is `approve` or `deny` (`arguments` changes what is approved), an option of a question, or text.
        With `by` the request's `responders` are checked: other principals get `ForbiddenResponder`.
        """
        return await self.answer_all({request: answer}, arguments=arguments, reason=reason, by=by)

    async def answer_all(
        self,
        answers: dict[str, str],
        *,
        arguments: JsonObject | None = None,
        reason: str | None = None,
        by: Principal | None = None,
    ) -> "Played":
        """Answer several requests at once."""
        given: dict[str, InputAnswer] = {}
        for name, answer in answers.items():
            request = self._pending(name, given)
            changed = None if arguments is None else await self._play.stage.edited(request, arguments)
            given[request.request_id] = _answer(request, answer, changed, reason)
        await self._play.stage.answer(given, by=by)
        return await self._play.advance()

    async def expire(self) -> "Played":
        """Let all pending requests with a time limit expire, and continue."""
        await self._play.stage.expire()
        return await self._play.advance()

    def _pending(self, name: str, given: dict[str, InputAnswer]) -> InputRequest:
        for request in self.pending:
            if name in (request.request_id, request.tool) and request.request_id not in given:
                return request
        waiting = ", ".join(f"{request.tool} ({request.request_id})" for request in self.pending) or "nothing"
        raise AssertionError(f"There is no pending request for {name!r}; pending: {waiting}.")

    @property
    def text(self) -> str:
        """The last message of the agent."""
        return next((text for text in reversed(self.texts)), "")

    @property
    def texts(self) -> tuple[str, ...]:
        """What the agent said, in order."""
        return tuple(event.data["message"] for event in self._of(EventType.MESSAGE_COMPLETED) if event.data)

    @property
    def result(self) -> Any:
        """The last structured result, or None."""
        return next(((event.data or {})["result"] for event in reversed(self._of(EventType.RESULT_COMPLETED))), None)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of all events, in order."""
        return tuple(event.type for event in self.events)

    @property
    def tool_calls(self) -> tuple[PlayedCall, ...]:
        """The calls that have a result, in the order in which the model requested them."""
        events = [event.data or {} for event in self._of(EventType.ACTION_RESULT)]
        results = {data["result"]["callId"]: data for data in events}
        return tuple(
            PlayedCall(call.tool, call.input, data["result"]["output"], data["status"])
            for call in self._calls
            if (data := results.get(call.call_id))
        )

    def state(self, slot: State[T]) -> T:
        """The value of a state slot at the end."""
        return slot.read(self._slots.get(slot.name))

    def items(self, slice: Slice[T]) -> tuple[T, ...]:
        """The items of a slice at the end."""
        return slice.read(self._slots.get(slice.slot))

    @property
    def plan(self) -> Plan | None:
        """The plan at the end; None: the model has made none."""
        return PLAN.read(self._slots.get(PLAN.name))

    def _of(self, type: str) -> list[Event]:
        return [event for event in self.events if event.type == type]


def _answer(request: InputRequest, answer: str, arguments: JsonObject | None, reason: str | None) -> InputAnswer:
    if request.kind == "approval":
        # Over HTTP any other word denies too. Here it is more likely a mistake in the test.
        if answer not in (APPROVE, DENY):
            raise AssertionError(f"An approval is answered with {APPROVE!r} or {DENY!r}, not {answer!r}.")
        changed = None if arguments is None else digest(arguments)
        return InputAnswer(option_id=answer, arguments=arguments, digest=changed, reason=reason)
    if answer in [option.id for option in request.options]:
        return InputAnswer(option_id=answer)
    return InputAnswer(text=answer)


async def play(
    agent: Agent,
    *messages: Message,
    model: Model | None = None,
    mode: Mode = "conversation",
    principal: Principal = LOCAL,
    settings: Settings | None = None,
    can_ask: bool | None = None,
) -> Played:
    """Run a session of this agent, one turn for each message.

    It stops at input requests (`played.pending`) and continues with `played.answer`. By default conversations can ask
    people and tasks cannot, as over HTTP.
    """
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    recording = RecordingStore(store)
    terms = StartTerms(mode, principal, mode == "conversation" if can_ask is None else can_ask)
    recorded_store = cast(Store, recording)
    steps = LocalSteps(recorded_store, AgentRegistry([agent]), OneModel(model or DemoModel()), settings or Settings())
    stage = Stage(recorded_store, agent, steps, terms)
    return await _Play(store, recording, stage, agent.while_waiting == "deny", messages).advance()
