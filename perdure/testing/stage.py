"""A session without Temporal: the real harness over a store in memory, and the models that answer there."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import (
    ForbiddenResponder,
    IdempotencyConflict,
    ModelFailed,
    NeedsAttention,
    PerdureError,
    TokenConflict,
    ToolFailed,
)
from perdure.harness.harness import Harness
from perdure.models.base import Delta, Model, ModelSource, Prompt, Reply, TextDelta, finish_reason, usage_of
from perdure.protocol import names
from perdure.protocol.deliveries import (
    CHILD_RESULT,
    MAIN,
    Capabilities,
    DeliveryBody,
    DeliveryRef,
    DispatchReceipt,
    Message,
    Mode,
    Principal,
    QueueMode,
)
from perdure.protocol.dispatch import check_names, text_of
from perdure.protocol.inputs import InputAnswer, InputRequest, OpenInput
from perdure.protocol.requests import (
    CollectChildren,
    Conclusion,
    Coordinates,
    DispatchChildren,
    Failure,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    ProgramOutcome,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
)
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import read_edit
from perdure.session.inputs import continued, may_answer, resolved
from perdure.session.queue import checked_mode
from perdure.session.state import hash_token
from perdure.session.turn import ContinueAsNew, StepFailed, run_turn
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.engine.rows import utc_now
from perdure.store.inputs import Answering, InputQuery, InputRow, Vote
from perdure.store.values import Attempt, Commit, Committed, NewSession

SESSION = "session"


class RecordingStore:
    """A store that records the names of the slots written through it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        self.names.update(write.name for write in commit.slots)
        return await self._store.commit(commit)


@dataclass(frozen=True)
class StartTerms:
    """The options with which a session is started."""

    mode: Mode
    principal: Principal
    can_ask: bool


@dataclass(frozen=True)
class Dispatched:
    """Work that was handed to another session, which is not played."""

    agent: str
    to: str
    input: Any
    dispatch_id: str
    lane: str
    queue_mode: QueueMode | None = None


class Dispatches:
    """Accepts what is dispatched, once under each id, and shows it."""

    def __init__(self) -> None:
        self._accepted: dict[str, Dispatched] = {}

    @property
    def all(self) -> tuple[Dispatched, ...]:
        return tuple(self._accepted.values())

    async def dispatch(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str,
        principal: Principal,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> DispatchReceipt:
        check_names(to, dispatch_id)
        text_of(input)
        asked = Dispatched(agent, to, input, dispatch_id, lane, checked_mode(queue_mode))
        first = self._accepted.setdefault(dispatch_id, asked)
        if first != asked:
            raise IdempotencyConflict
        number = list(self._accepted).index(dispatch_id)
        return DispatchReceipt(
            dispatch_id=dispatch_id,
            accepted_at=utc_now(),
            session_id=to if to.startswith(names.SESSION_ID) else f"{names.SESSION_ID}{number}",
            delivery_id=f"dlv_{number}",
            deduplicated=first is not asked,
        )


class LocalSteps:
    """Executes steps in this process. Tool calls are retried as declared; other steps run once."""

    def __init__(self, store: Store, agents: AgentRegistry, models: ModelSource, settings: Settings) -> None:
        self.dispatches = Dispatches()
        self._store = store
        self._harness = Harness(store, agents, models, settings, dispatch=self.dispatches.dispatch)
        self._generations = count(1)

    async def run(self, request: TurnRequest) -> TurnResult:
        """Run a turn, and for each call that it hands to another agent the session of that, one after the other."""
        result = await self._run(request)
        while result.awaited is not None:
            await self._run_children(result.awaited.at)
            if result.awaited.request is None:
                # It has parked as well.
                return result
            result = await self._run(TurnRequest.model_validate(result.awaited.request))
        return result

    async def _run(self, request: TurnRequest) -> TurnResult:
        match await run_turn(request, self):
            case TurnResult() as result:
                return result
            case ContinueAsNew():
                raise AssertionError("a played turn does not continue as new")

    async def _run_children(self, at: Coordinates) -> None:
        pending, created = await self._harness.children.dispatch(DispatchChildren(at=at))
        if len(pending.keys) > len(created):
            raise AssertionError("play() calls no other servers: put an Agent in the place of the RemoteAgent")
        for child in created:
            session = child.session
            # Played children ask nobody: there is no capability in the request.
            task = TurnRequest(
                session_id=session.session_id, turn=0, agent=session.agent, mode="task", deliveries=(child.task,)
            )
            await self.run(task)
        reports = [row.ref for row in await self._store.unread(at.session_id) if row.kind == CHILD_RESULT]
        results = tuple(DeliveryRef.model_validate(ref) for ref in reports)
        await self._harness.children.collect(CollectChildren(at=at, deliveries=results))

    async def call_model(self, call: ModelCall, *, label: str | None = None) -> ModelOutcome:
        del label
        try:
            return await self._harness.call_model(call, self._attempt(1))
        except PerdureError as error:
            raise _step_failed(error) from error

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        try:
            for number in range(1, call.call.attempts):
                try:
                    return await self._harness.call_tool(call, self._attempt(number))
                except ToolFailed:
                    continue
            return await self._harness.call_tool(call, self._attempt(call.call.attempts))
        except PerdureError as error:
            raise _step_failed(error) from error

    async def run_program(self, call: ToolCall) -> ProgramOutcome:
        try:
            return await self._harness.run_program(call, self._attempt(1))
        except PerdureError as error:
            raise _step_failed(error) from error

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        try:
            return await self._harness.resume_turn(resumption, self._attempt(1))
        except PerdureError as error:
            raise _step_failed(error) from error

    async def park(self, park: ParkTurn) -> None:
        await self._harness.park_turn(park)

    async def conclude(self, conclusion: Conclusion) -> None:
        await self._harness.conclude_turn(conclusion)

    def parallel(self, limit: int | None, calls: int) -> int:
        return limit or calls

    def should_continue_as_new(self) -> bool:
        return False

    def cancelled(self, *, early: bool = False) -> bool:
        return False

    def ends_after_children(self) -> bool:
        return True

    def _attempt(self, number: int) -> Attempt:
        return Attempt(number, next(self._generations))


class Stage:
    """One session in the role of its driver: a turn for each delivery, and a wait while requests are open."""

    def __init__(self, store: Store, agent: Agent, steps: LocalSteps, terms: StartTerms) -> None:
        self._store = store
        self._agent = agent
        self.steps = steps
        self._terms = terms
        self._token = hash_token("token")
        self._deliveries = count()
        self._turns = count()
        self._open: tuple[OpenInput, ...] = ()

    async def begin(self, message: Message) -> None:
        terms = self._terms
        delivery = self._delivery(DeliveryBody(message=message, principal=terms.principal))
        capabilities = Capabilities(request_input=terms.can_ask)
        session = NewSession(SESSION, self._agent.name, terms.mode, self._token, terms.principal, capabilities)
        await self._store.create_session(session, delivery)
        await self._turn(self._ref(delivery, "message"))

    async def deliver(self, message: Message) -> None:
        """Deliver another message. While requests are open it denies them (`while_waiting`)."""
        if self._open:
            requests, now = [row.request for row in await self.waiting()], utc_now()
            denials = {each.request_id: continued(each, self._terms.principal, now) for each in requests}
            await self.answer(denials, message=message, ends=True)
            return
        delivery = self._delivery(DeliveryBody(message=message, principal=self._terms.principal))
        await self._store.accept(delivery)
        await self._turn(self._ref(delivery, "message"))

    async def answer(
        self,
        answers: Mapping[str, InputAnswer],
        message: Message | None = None,
        *,
        ends: bool = False,
        by: Principal | None = None,
    ) -> None:
        """`by`: the responder to check; `ForbiddenResponder` when this principal may not answer."""
        principal = by or self._terms.principal
        if by is not None:
            for row in await self.waiting():
                asked = row.request.request_id in answers
                if asked and not may_answer(row.request.responders, by, self._terms.principal):
                    raise ForbiddenResponder
        body = DeliveryBody(kind="answer", answers=tuple(answers), message=message, principal=principal)
        delivery = self._delivery(body)
        whose = {"principal_id": principal.principal_id, "owner": principal.owner}
        given = [Vote(request_id, answer.model_copy(update=whose), ends) for request_id, answer in answers.items()]
        answering = Answering(SESSION, given, delivery, always=message is not None)
        answered = await self._store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))
        if answered.closed or message is not None:
            await self._turn(self._ref(delivery, "answer"))

    async def edited(self, request: InputRequest, arguments: JsonObject) -> JsonObject:
        """The arguments that an approval changes, validated; `Invalid` when the tool does not accept them."""
        return await read_edit(AgentRegistry([self._agent]), request, arguments)

    async def expire(self) -> None:
        """Let every open request with a time limit expire."""
        expired = tuple(each.request_id for each in self._open if each.expires_at is not None)
        await self._turn(expired=expired)

    async def waiting(self) -> Sequence[InputRow]:
        return (await self._store.inputs(InputQuery(session_id=SESSION))).rows

    async def _turn(self, *deliveries: DeliveryRef, expired: tuple[str, ...] = ()) -> None:
        request = TurnRequest(
            session_id=SESSION,
            turn=next(self._turns),
            agent=self._agent.name,
            mode=self._terms.mode,
            capabilities=Capabilities(request_input=self._terms.can_ask),
            deliveries=deliveries,
            open=self._open,
            expired=expired,
        )
        self._open = (await self.steps.run(request)).open

    def _delivery(self, body: DeliveryBody) -> NewDelivery:
        return NewDelivery(
            session_id=SESSION,
            delivery_id=f"delivery-{next(self._deliveries)}",
            body=body.model_dump(mode="json"),
            owner=self._terms.principal.owner,
        )

    def _ref(self, delivery: NewDelivery, kind: Any) -> DeliveryRef:
        return DeliveryRef(id=delivery.delivery_id, kind=kind, token_hash=self._token)


def _step_failed(error: PerdureError) -> StepFailed:
    failure = Failure(code=error.code, message=error.message, structural=isinstance(error, TokenConflict))
    return StepFailed(failure, held=isinstance(error, NeedsAttention))


# --- models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedCall:
    """A tool call in a script; `call` makes one."""

    tool: str
    arguments: JsonObject
    call_id: str | None = None


def call(tool: str, /, **arguments: Any) -> ScriptedCall:
    """A tool call for a `ScriptedModel`."""
    return ScriptedCall(tool, arguments)


Line: TypeAlias = str | ScriptedCall | Sequence[str | ScriptedCall] | ModelResponse | Exception
"""One reply of a script: text, a call, several of both, a whole response, or an exception to raise."""


class ScriptedModel:
    """Gives these replies in order: text, a tool call, several of both, or an exception to raise."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = list(lines)
        #: The prompts that it got, in order.
        self.prompts: list[Prompt] = []

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        """Give the next reply."""
        number = len(self.prompts)
        self.prompts.append(prompt)
        if number >= len(self._lines):
            raise ModelFailed(f"The script has {len(self._lines)} replies, and the agent needs one more.")
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
        """The one model, whatever is asked for."""
        return self._model
