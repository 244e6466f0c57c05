"""From a model's reply to its records, events and calls."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast
from uuid import uuid4

from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_core import from_json, to_json

from perdure.agents.agent import FINAL_OUTPUT, Limits
from perdure.agents.approval import Call
from perdure.bounds import DEEPEST, deeper_than
from perdure.errors import ModelFailed
from perdure.protocol.deliveries import Mode, Principal
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import REPLY, outcome_key
from perdure.protocol.requests import CallRef, Coordinates, Failure, Finished, ModelOutcome
from perdure.protocol.wire import JsonObject
from perdure.session.decisions import CANCELLED
from perdure.settings import Settings
from perdure.store.attempts import AttemptEnd, error_of
from perdure.store.values import Attempt, Committed, NewRecord, Partial, SessionChange

from .events import Ending, EventFactory, results_in
from .journal import (
    FAILURE,
    OUTCOME,
    STEERED,
    StoredFailure,
    StoredReply,
    TurnJournal,
    dump_response,
    model_outcome,
    outcome_of_reply,
    written,
)
from .journal import REPLY as REPLY_FORMAT
from .prompt import digest_of
from .tools import outcomes
from .tools.approvals import Approvals
from .tools.builtin import (
    ASK_QUESTION,
    CODE_MODE,
    NOT_COMPARED,
    NOT_FULFILLED,
    TOO_EARLY,
    TRIES,
    FinalOutput,
    Offer,
    ProgramTool,
    read_question,
    with_result_as_text,
    without_final,
)
from .tools.records import Ask, Outcome, RequestedCall, Result, action_of, summary
from .tools.toolbox import InvalidArguments, Usable
from .turn import cancelled_before

log = logging.getLogger("perdure.model")


#: The most characters of arguments in one reply. Reading and validating them blocks the event loop.
_LARGEST = 1_048_576
_TOO_LARGE = f"The calls of one reply have at most {_LARGEST} characters of arguments together."


@dataclass(frozen=True)
class RequestedCalls:
    """The calls of one reply: those that run, those that wait and those that are refused."""

    calls: tuple[RequestedCall, ...] = ()
    #: The outcomes of the calls that are not run.
    refused: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    #: The structured result, if there is one; then `calls` holds no call of `final_output`.
    result: Result | None = None
    #: How many calls run at the same time.
    parallel: int | None = None
    #: Tools whose calls readers do not see as actions.
    hidden: frozenset[str] = frozenset()

    @property
    def runs(self) -> tuple[RequestedCall, ...]:
        return tuple(call for call in self.calls if call.runs)

    @property
    def requests(self) -> tuple[InputRequest, ...]:
        return tuple(call.ask.request for call in self.calls if call.ask)

    @property
    def children(self) -> tuple[RequestedCall, ...]:
        return tuple(call for call in self.calls if call.child)

    @property
    def parks(self) -> bool:
        """Whether the turn parks at once: some calls wait for people, and none runs."""
        return bool(self.requests) and not (self.runs or self.children)

    def records(self, at: Coordinates) -> tuple[NewRecord, ...]:
        return tuple(
            written(at.turn, at.step, outcome_key(call_id), OUTCOME, outcome)
            for call_id, outcome in self.refused.items()
        )

    def events(self, factory: EventFactory, at: Coordinates | None = None, what: str = "actions") -> Sequence[NewEvent]:
        """The requested actions, without those that wait for people, and the results of the refused ones.

        `at`: the step that requested them, if it is not that of the events; `what`: its key.
        """
        shown = [call for call in self.calls if call.ask is None and call.tool not in self.hidden]
        actions = [action_of(call) for call in shown]
        started = (factory.of_step(EventType.ACTIONS_REQUESTED, what, {"actions": actions}),) if actions else ()
        refused = [
            factory.action_result(call.call_id, call.tool, outcome, at, of_child=bool(call.child))
            for call in shown
            if (outcome := self.refused.get(call.call_id))
        ]
        return (*started, *refused)


@dataclass(frozen=True)
class ReplyReader:
    """Decides for each call of a reply whether it runs, waits for people or another session, or is refused."""

    offer: Offer
    approvals: Approvals
    settings: Settings
    limits: Limits
    #: How many sessions are above this one.
    depth: int = 0

    async def read(self, response: ModelResponse) -> RequestedCalls:
        calls: list[RequestedCall] = []
        refused: dict[str, Outcome] = {}
        results: list[tuple[RequestedCall, Result]] = []
        budget = _Budget(calls=self.limits.calls_per_step, children=self.limits.subagents_per_step)
        for part in response.tool_calls:
            call, decided = await self._classify(part, budget)
            budget.calls -= bool(call.ref or call.ask or call.child)
            budget.children -= bool(call.child)
            match decided:
                case Outcome() as refusal:
                    refused[call.call_id] = refusal
                case Result() as result:
                    results.append((call, result))
                case None:
                    pass
            calls.append(call)
        requested = _with_result(calls, refused, results)
        return replace(requested, parallel=self.limits.parallel_calls, hidden=self.offer.hidden)

    async def read_calls_of_program(
        self, parts: Sequence[ToolCallPart], problems: Mapping[str, str], *, children: int, stage: str
    ) -> RequestedCalls:
        """The calls of a program, some of which have a problem; `children`: how many more may go to subagents."""
        calls: list[RequestedCall] = []
        refused: dict[str, Outcome] = {}
        budget = _Budget(calls=len(parts), children=children)
        for part in parts:
            if problem := problems.get(part.tool_call_id):
                call: RequestedCall = RequestedCall(call_id=part.tool_call_id, tool=part.tool_name, input={})
                decided: Outcome | Result | None = outcomes.failed(f"Invalid arguments for {call.tool}: {problem}.")
            else:
                call, decided = await self._classify(part, budget)
            budget.children -= bool(call.child)
            if isinstance(decided, Outcome):
                refused[call.call_id] = decided
            ref = call.ref.model_copy(update={"stage": stage}) if call.ref else None
            calls.append(call.model_copy(update={"ref": ref}))
        return RequestedCalls(tuple(calls), refused, parallel=self.limits.parallel_calls)

    async def _classify(self, part: ToolCallPart, budget: "_Budget") -> "_Classified":
        requested = RequestedCall(call_id=part.tool_call_id, tool=part.tool_name, input={})
        try:
            requested = requested.model_copy(update={"input": _arguments(part, budget)})
            return await self._decide(requested, budget)
        except InvalidArguments as invalid:
            return requested, outcomes.failed(str(invalid))

    async def _decide(self, requested: RequestedCall, budget: "_Budget") -> "_Classified":
        name, arguments = requested.tool, requested.input
        call = Call(id=requested.call_id, tool=name, arguments=arguments)
        if budget.calls <= 0:
            return requested, outcomes.too_many(self.limits.calls_per_step)
        if name == FINAL_OUTPUT and self.offer.output:
            return requested, await _result(self.offer.output, arguments, budget)
        if name == ASK_QUESTION and self.offer.asks:
            # Nothing runs after the answer, so it has no `ref`.
            question = self.approvals.question(call, read_question(arguments))
            return requested.model_copy(update={"ask": question}), None
        if name == CODE_MODE and self.offer.program:
            self.offer.program.check(arguments)
            ref = self._ref(call, self.offer.program)
            return requested.model_copy(update={"ref": ref, "program": True}), None
        if child := self.offer.children.get(name):
            return child.read(requested, self.depth, self.limits, budget.children)
        tool = self.offer.tools.get(name)
        if tool is None:
            known = ", ".join(self.offer.names) or "none"
            raise InvalidArguments(f"Unknown tool {name!r}. Tools that exist: {known}.")
        runs_with = tool.read(arguments)
        call = replace(call, arguments=runs_with.json)
        requested = requested.model_copy(update={"input": call.arguments})
        ref = self._ref(call, tool)
        match await self.approvals.approval(call, runs_with, tool.approval_policy):
            case None:
                return requested.model_copy(update={"ref": ref}), None
            case Ask() as ask:
                return requested.model_copy(update={"ref": ref, "ask": ask}), None
            case Outcome() as refusal:
                return requested, refusal

    def _ref(self, call: Call, tool: "Usable | ProgramTool") -> CallRef:
        schema = tool.definition.parameters_json_schema
        return CallRef(
            call_id=call.id,
            tool=call.tool,
            summary=summary(call.tool, call.arguments, schema) if self.settings.ui_detail == "on" else "",
            timeout=tool.timeout,
            heartbeat=self.settings.heartbeat_timeout,
            attempts=0 if self.limits.max_attempts is None else self.limits.max_attempts + tool.retries,
            pool=tool.pool,
        )


@dataclass
class _Budget:
    """What the remaining calls of a reply may still use."""

    calls: int
    #: Results that are validated: each needs a process of its own, one after the other.
    results: int = TRIES
    #: Characters of arguments.
    size: int = _LARGEST
    #: Calls that go to subagents.
    children: int = 0


#: A call, and its result if it neither runs nor waits: the outcome of a refused one, or the turn's result.
_Classified: TypeAlias = tuple[RequestedCall, Outcome | Result | None]


async def _result(output: FinalOutput, arguments: JsonObject, budget: _Budget) -> Result | Outcome:
    if budget.results <= 0:
        return outcomes.failed(NOT_COMPARED)
    budget.results -= 1
    budget.calls -= 1
    return await output.read(arguments)


def _with_result(
    calls: list[RequestedCall], refused: dict[str, Outcome], results: Sequence[tuple[RequestedCall, Result]]
) -> RequestedCalls:
    if not results:
        return RequestedCalls(tuple(calls), refused)
    if any(call.ask for call in calls):
        result_ids = {call.call_id for call, _ in results}
        return RequestedCalls(tuple(calls), {**refused, **dict.fromkeys(result_ids, outcomes.failed(TOO_EARLY))})
    # The first result counts. The calls of `final_output` leave the history, so their outcomes must leave it too.
    others = tuple(call for call in calls if call.tool != FINAL_OUTPUT)
    kept = {call.call_id: refused[call.call_id] for call in others if call.call_id in refused}
    return RequestedCalls(others, kept, results[0][1])


def _arguments(part: ToolCallPart, budget: _Budget) -> JsonObject:
    """The arguments as strict JSON (no NaN, no infinity), so that they can be written again."""
    try:
        text = part.args or "{}" if isinstance(part.args, str | None) else to_json(part.args, inf_nan_mode="constants")
        if len(text) > budget.size:
            raise InvalidArguments(f"Invalid arguments for {part.tool_name}: too large. {_TOO_LARGE}")
        budget.size -= len(text)
        arguments: object = from_json(text, allow_inf_nan=False)
    except ValueError as broken:
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not JSON ({broken}).") from None
    if not isinstance(arguments, dict):
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not a JSON object.")
    if deeper_than(arguments, DEEPEST):
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: nested deeper than {DEEPEST} levels.")
    return cast(JsonObject, arguments)


@dataclass(frozen=True)
class Settlement:
    """What the last commit of a step writes; the record that ends the step comes first."""

    #: What the turn gets to know of it.
    outcome: ModelOutcome
    records: Sequence[NewRecord]
    events: Sequence[NewEvent]
    change: SessionChange
    close: bool = False
    opens: Sequence[InputRequest] = ()

    @property
    def ended(self) -> str | None:
        """How the turn ends with this commit, if it does."""
        if self.opens:
            return "parked"
        types = {event.type for event in self.events}
        if EventType.TURN_FAILED in types:
            return "failed"
        if EventType.TURN_CANCELLED in types:
            return "cancelled"
        return "completed" if EventType.TURN_COMPLETED in types else None

    @property
    def end(self) -> tuple[AttemptEnd, JsonObject | None]:
        """How the attempt that settles with this has ended, for its report."""
        failure = self.outcome.failure if isinstance(self.outcome, Finished) else None
        if failure is None:
            return "succeeded", None
        return "cancelled" if self.ended == "cancelled" else "failed", error_of(failure.code, failure.message)


@dataclass(frozen=True)
class UsableReply:
    """A usable reply of the model, its calls and its usage."""

    response: ModelResponse
    reason: FinishReason
    usage: Usage
    requested: RequestedCalls
    #: The principal for whom the model acts.
    speaker: Principal | None
    #: When the turn fails, in seconds since the epoch.
    deadline: float | None = None
    #: What interrupted attempts have streamed before: `response` begins with their text.
    partial: Partial | None = None
    #: The instructions that it was asked with.
    instructions: str | None = None


def is_unfulfilled(offer: Offer, turn: TurnJournal, requested: RequestedCalls) -> bool:
    """Whether a result is required, and the model has not produced it or has used up its tries."""
    if offer.output is None or requested.result:
        return False
    tries = [call for reply in turn.replies() for call in reply.calls if call.tool == FINAL_OUTPUT]
    tries += [call for call in requested.calls if call.tool == FINAL_OUTPUT]
    continues = requested.requests or requested.runs or requested.children
    return not requested.calls or (len(tries) >= TRIES and not continues)


def settle_reply(factory: EventFactory, mode: Mode, answer: UsableReply) -> Settlement:
    """The turn ends or parks with this reply, or continues with its calls."""
    requested, result = answer.requested, answer.requested.result
    events = (*_reply_events(factory, answer), *requested.events(factory))
    completed = factory.step_completed(answer.reason, answer.usage)
    if requested.parks:
        parking = (completed, factory.inputs_requested(requested.requests))
        return _settled(factory, answer, (*events, *parking), factory.parked(), parked=True)
    if requested.calls:
        # The turn continues even if all calls are refused: the model gets the reasons and replies again. With a
        # result, it ends after the calls.
        kept = replace(answer, response=without_final(answer.response)) if result else answer
        return _settled(factory, kept, events, result=result)
    if result:
        kept = replace(answer, response=with_result_as_text(answer.response, result))
        ending = factory.completed(mode, completed, factory.result_completed(result.value))
        return _settled(factory, kept, events, ending)
    return _settled(factory, answer, events, factory.completed(mode, completed))


def settle_steered(factory: EventFactory, answer: UsableReply) -> Settlement:
    """The turn goes on after a reply without calls, because a message waits that is to enter it."""
    completed = factory.step_completed(answer.reason, answer.usage)
    return _settled(factory, answer, (*_reply_events(factory, answer), completed), continues=True)


def settle_unfulfilled(factory: EventFactory, mode: Mode, answer: UsableReply) -> Settlement:
    """The turn fails because the model has not produced the required result. Its reply is kept."""
    events = (*_reply_events(factory, answer), *answer.requested.events(factory))
    events = (*events, factory.step_completed(answer.reason, answer.usage))
    return _settled(factory, answer, events, factory.failed(mode, NOT_FULFILLED), failure=NOT_FULFILLED)


def settle_cancelled(factory: EventFactory, mode: Mode, answer: UsableReply) -> Settlement:
    """The turn was cancelled during the model call. The reply is kept, and none of its calls runs."""
    not_run = {
        call.call_id: cancelled_before(call)
        for call in answer.requested.calls
        if call.call_id not in answer.requested.refused
    }
    kept = replace(answer, requested=replace(answer.requested, refused={**answer.requested.refused, **not_run}))
    events = (*_reply_events(factory, answer), factory.step_completed(answer.reason, answer.usage))
    return _settled(factory, kept, events, factory.cancelled(mode, CANCELLED), failure=CANCELLED)


def settle_result(factory: EventFactory, mode: Mode, result: Result) -> Settlement:
    """The turn ends with a result whose other calls have ended. `factory` is that of the step with the result."""
    empty = ModelResponse(parts=[])
    stored = StoredReply(
        response=dump_response(with_result_as_text(empty, result)), finish_reason="stop", usage=Usage()
    )
    record = written(factory.at.turn, factory.at.step + 1, REPLY, REPLY_FORMAT, stored)
    ending = factory.completed(mode, factory.result_completed(result.value))
    return Settlement(outcome_of_reply(stored), (record,), ending.events, ending.change(), ending.closes)


def settle_answered(factory: EventFactory, mode: Mode) -> Settlement:
    """The turn ends with its last reply: the message that it was to go on with waits no more, or has to wait."""
    stored = StoredReply(response=dump_response(ModelResponse(parts=[])), finish_reason="stop", usage=Usage())
    record = written(factory.at.turn, factory.at.step + 1, REPLY, REPLY_FORMAT, stored)
    ending = factory.completed(mode)
    return Settlement(outcome_of_reply(stored), (record,), ending.events, ending.change(), ending.closes)


def settle_failure(factory: EventFactory, mode: Mode, failure: Failure, usage: Usage) -> Settlement:
    return _failed(factory, factory.failed(mode, failure), failure, usage)


def settle_stopped(factory: EventFactory, mode: Mode, usage: Usage) -> Settlement:
    """The turn was cancelled while it failed. Its usage is still reported."""
    return _failed(
        factory, factory.cancelled(mode, CANCELLED), CANCELLED, usage, factory.step_completed("error", usage)
    )


def _settled(
    factory: EventFactory,
    answer: UsableReply,
    events: Sequence[NewEvent],
    ending: Ending | None = None,
    **stored: Any,
) -> Settlement:
    """The reply is recorded, with the outcomes of the calls that do not run."""
    requested = answer.requested
    reply = StoredReply(
        response=dump_response(answer.response),
        finish_reason=answer.reason,
        usage=answer.usage,
        calls=requested.calls,
        parallel=requested.parallel,
        deadline=answer.deadline,
        speaker=answer.speaker,
        instructions=None if answer.instructions is None else digest_of(answer.instructions),
        **stored,
    )
    form = STEERED if reply.continues else REPLY_FORMAT
    record = written(factory.at.turn, factory.at.step, REPLY, form, reply)
    counts: dict[str, Any] = {"steps": 1, "usage": answer.usage, "tool_calls": results_in(events)}
    return Settlement(
        outcome=outcome_of_reply(reply),
        records=(record, *requested.records(factory.at)),
        events=(*events, *(ending.events if ending else ())),
        change=ending.change(**counts) if ending else SessionChange(**counts),
        close=bool(ending and ending.closes),
        opens=requested.requests if reply.parked else (),
    )


def _failed(factory: EventFactory, ending: Ending, failure: Failure, usage: Usage, *before: NewEvent) -> Settlement:
    stored = StoredFailure(failure=failure, usage=usage)
    record = written(factory.at.turn, factory.at.step, REPLY, FAILURE, stored)
    outcome = Finished(usage=usage, failure=failure)
    return Settlement(outcome, (record,), (*before, *ending.events), ending.change(usage=usage), ending.closes)


def _reply_events(factory: EventFactory, answer: UsableReply) -> tuple[NewEvent, ...]:
    """The complete reasoning and the complete text of the step."""
    reasoning = answer.partial.reasoning if answer.partial else ""
    reasoning += "".join(part.content for part in answer.response.parts if isinstance(part, ThinkingPart))
    text = "".join(part.content for part in answer.response.parts if isinstance(part, TextPart))
    events: list[NewEvent] = []
    if reasoning.strip():
        events.append(factory.of_step(EventType.REASONING_COMPLETED, "reasoning", {"reasoning": reasoning}))
    if text.strip():
        data = {"message": text, "finishReason": answer.reason}
        events.append(factory.of_step(EventType.MESSAGE_COMPLETED, "message", data))
    return tuple(events)


def outcome_after(done: Committed, mine: ModelOutcome) -> ModelOutcome:
    """The outcome of the step: `mine`, or that of another attempt whose record existed already."""
    outcome = model_outcome(done.existing) if done.existing else mine
    return outcome.model_copy(update={"head": done.session.events})


def log_failure(at: Coordinates, attempt: Attempt, failed: ModelFailed) -> None:
    """Log the details that readers must not see, with the error id that they see."""
    error_id = failed.details.setdefault("errorId", str(uuid4()))
    log.warning(
        "the model call of %s, turn %d, step %d, attempt %d failed, error id %s: %s",
        *(at.session_id, at.turn, at.step, attempt.number, error_id),
        " ".join(filter(None, (failed.message, failed.reason))),
    )


def failure_of(failed: ModelFailed) -> Failure:
    details = {"message": failed.message, "name": "ModelFailed", **failed.details}
    return Failure(code=failed.code, message=failed.message, details=details)
