"""From a model's reply to the records, events and calls that it leads to."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_core import from_json, to_json

from perdure.agents.agent import FINAL_OUTPUT, Limits
from perdure.agents.approval import Call
from perdure.protocol.deliveries import Mode
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import REPLY, outcome_slot
from perdure.protocol.principals import Principal
from perdure.protocol.requests import CallRef, Coordinates, Failure
from perdure.protocol.wire import DEEPEST, JsonObject, deeper_than
from perdure.session.turn import CANCELLED
from perdure.settings import Settings
from perdure.store.values import NewRecord, SessionChange
from perdure.text import shortened

from .events import Ending, EventFactory, results_in
from .journal import (
    FAILURE,
    OUTCOME,
    Ask,
    AskedCall,
    Outcome,
    Result,
    StoredFailure,
    StoredReply,
    dump_response,
    written,
)
from .journal import REPLY as REPLY_FORMAT
from .tools import outcomes
from .tools.approvals import Approvals
from .tools.builtin import (
    ASK_QUESTION,
    NOT_COMPARED,
    NOT_FULFILLED,
    TOO_EARLY,
    TRIES,
    FinalOutput,
    Offer,
    as_answer,
    read_question,
    without_final,
)
from .tools.toolbox import InvalidArguments, Usable
from .turn import cancelled_before

_SECRET = ("token", "password", "secret", "key", "credential", "authorization")
_SHORT = 40
_LONGEST = 160
#: Of an id, which is part of keys. Providers take back what they have sent, and nothing but these characters.
_LONGEST_ID = 200
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNNAMED = "tool_without_a_usable_name"


class CallNames:
    """Ids and tools of calls, whatever the provider hands out: readers know a call by its id alone, unique in its
    session, and providers refuse a whole session in which a tool has a name that none can have.
    """

    def __init__(self, at: Coordinates, taken: frozenset[str], tools: Collection[str]) -> None:
        self._at = at
        self._taken = taken
        self._tools = tools

    def of(self, call_id: str) -> str:
        usable = _usable(call_id)
        return usable if usable not in self._taken else self._own(usable)

    def tool(self, name: str) -> str:
        return name if name in self._tools or _NAME.fullmatch(name) else _UNNAMED

    def applied(self, response: ModelResponse) -> ModelResponse:
        """The response with each call under a name of its own."""
        names: set[str] = set()
        parts: list[Any] = []
        for part in response.parts:
            if isinstance(part, ToolCallPart):
                name = self.of(part.tool_call_id)
                own, number = self._own(_usable(part.tool_call_id)), len(names)
                while name in names:
                    name, number = f"{own}_{number}", number + 1
                names.add(name)
                part = replace(part, tool_call_id=name, tool_name=self.tool(part.tool_name))
            parts.append(part)
        return replace(response, parts=parts)

    def _own(self, call_id: str) -> str:
        return f"{call_id}_{self._at.turn}_{self._at.step}"


def _usable(call_id: str) -> str:
    """The id itself, or one in its place: the same for each mention of it."""
    if call_id and call_id.isprintable() and len(call_id) <= _LONGEST_ID:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:24]


def summary(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> str:
    """The call in a line, without what looks like a secret, or is one by the schema of the arguments."""
    declared = (schema or {}).get("properties", {})
    shown = ", ".join(f"{name}={_shown(name, value, declared.get(name))}" for name, value in arguments.items())
    return shortened(f"{tool}({shown})", _LONGEST)


def _is_secret(declared: Any) -> bool:
    """As pydantic says it of a `SecretStr`, alone or as one of several types."""
    if not isinstance(declared, Mapping):
        return False
    known = cast("Mapping[str, Any]", declared)
    return known.get("format") == "password" or any(_is_secret(each) for each in known.get("anyOf", ()))


def _shown(name: str, value: Any, declared: Any) -> str:
    if any(word in name.lower() for word in _SECRET) or _is_secret(declared):
        return "•••"
    # Nested values may hold secrets of their own; their size says enough.
    if isinstance(value, dict | list):
        return f"{{{len(value)}}}" if isinstance(value, dict) else f"[{len(value)}]"  # pyright: ignore[reportUnknownArgumentType]
    return shortened(json.dumps(value, ensure_ascii=False), _SHORT)


#: Tries that the engine has for a call whose worker died, beside the tool's own retries: as many as for a model call.
_ATTEMPTS = 10

#: Characters of arguments, all calls of a reply together: far more than models write. While arguments are read and
#: compared with their types nobody else is served.
_LARGEST = 1_048_576
_TOO_LARGE = f"The calls of one reply have at most {_LARGEST} characters of arguments together."


@dataclass(frozen=True)
class RequestedCalls:
    """The calls of one reply, sorted."""

    calls: tuple[AskedCall, ...] = ()
    #: Of the calls that are not run at all.
    refused: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    #: The result that was handed over; then no call of `final_output` is among the calls.
    result: Result | None = None
    #: How many calls run at the same time.
    parallel: int | None = None
    #: Tools whose calls are no actions to readers.
    hidden: frozenset[str] = frozenset()

    @property
    def runs(self) -> tuple[AskedCall, ...]:
        return tuple(call for call in self.calls if call.runs)

    @property
    def requests(self) -> tuple[InputRequest, ...]:
        return tuple(call.ask.request for call in self.calls if call.ask)

    @property
    def parks(self) -> bool:
        """Whether nothing is left to do but to wait."""
        return bool(self.requests) and not self.runs

    def records(self, at: Coordinates) -> tuple[NewRecord, ...]:
        return tuple(
            written(at.turn, at.step, outcome_slot(call_id), OUTCOME, outcome)
            for call_id, outcome in self.refused.items()
        )

    def events(self, facts: EventFactory) -> tuple[NewEvent, ...]:
        """The actions that are asked for, but for those that wait for people, and what came of the refused ones."""
        shown = [call for call in self.calls if call.ask is None and call.tool not in self.hidden]
        actions = [
            {"kind": "tool-call", "callId": call.call_id, "toolName": call.tool, "input": call.input} for call in shown
        ]
        asked = (facts.of_step(EventType.ACTIONS_REQUESTED, "actions", {"actions": actions}),) if actions else ()
        refused = [
            facts.action_result(call.call_id, call.tool, outcome)
            for call in shown
            if (outcome := self.refused.get(call.call_id))
        ]
        return (*asked, *refused)


@dataclass(frozen=True)
class ReplyReader:
    """Sorts the calls of one step."""

    offer: Offer
    gates: Approvals
    settings: Settings
    limits: Limits

    async def sort(self, response: ModelResponse) -> RequestedCalls:
        calls: list[AskedCall] = []
        refused: dict[str, Outcome] = {}
        results: list[tuple[AskedCall, Result]] = []
        left = _Left(calls=self.limits.calls_per_step)
        for part in response.tool_calls:
            sorted_out = await self._sorted(part, left)
            call = _asked(part, sorted_out)
            left.calls -= bool(call.ref or call.ask)
            match sorted_out.verdict:
                case Outcome() as refusal:
                    refused[call.call_id] = refusal
                case Result() as result:
                    results.append((call, result))
                case _:
                    pass
            calls.append(call)
        asked = _with_result(calls, refused, results)
        return replace(asked, parallel=self.limits.parallel_calls, hidden=self.offer.hidden)

    async def _sorted(self, part: ToolCallPart, left: "_Left") -> "_Sorted":
        arguments: JsonObject = {}
        try:
            arguments = _arguments(part, left)
            return await self._judged(part, arguments, left)
        except InvalidArguments as invalid:
            return _Sorted(arguments, outcomes.failed(str(invalid)))

    async def _judged(self, part: ToolCallPart, arguments: JsonObject, left: "_Left") -> "_Sorted":
        name = part.tool_name
        call = Call(id=part.tool_call_id, tool=name, arguments=arguments)
        if left.calls <= 0:
            return _Sorted(arguments, outcomes.too_many(self.limits.calls_per_step))
        if name == FINAL_OUTPUT and self.offer.output:
            return _Sorted(arguments, await _result(self.offer.output, arguments, left))
        if name == ASK_QUESTION and self.offer.asks:
            return _Sorted(arguments, Waiting(self.gates.question(call, read_question(arguments))))
        tool = self.offer.tools.get(name)
        if tool is None:
            known = ", ".join(self.offer.names) or "none"
            raise InvalidArguments(f"Unknown tool {name!r}. Tools that exist: {known}.")
        runs_with = tool.read(arguments)
        call = replace(call, arguments=runs_with.json)
        ref = self._ref(call, tool)
        match await self.gates.approval(call, runs_with, tool.gate):
            case None:
                return _Sorted(call.arguments, ref)
            case Ask() as ask:
                return _Sorted(call.arguments, Waiting(ask, ref))
            case Outcome() as refusal:
                return _Sorted(call.arguments, refusal)

    def _ref(self, call: Call, tool: Usable) -> CallRef:
        return CallRef(
            call_id=call.id,
            tool=call.tool,
            summary=self._summary(call, tool) if self.settings.ui_detail == "on" else "",
            timeout=tool.timeout,
            heartbeat=self.settings.heartbeat_timeout,
            attempts=_ATTEMPTS + tool.retries,
        )

    def _summary(self, call: Call, tool: Usable) -> str:
        return summary(call.tool, call.arguments, tool.definition.parameters_json_schema)


@dataclass
class _Left:
    """What the other calls of a reply may still use."""

    calls: int
    #: Each is compared with its schema in a process of its own, one after the other.
    results: int = TRIES
    #: Of arguments, in characters.
    size: int = _LARGEST


@dataclass(frozen=True)
class Waiting:
    """A call that waits for people; a question has nothing to run afterwards."""

    ask: Ask
    ref: CallRef | None = None


@dataclass(frozen=True)
class _Sorted:
    arguments: JsonObject
    verdict: CallRef | Waiting | Outcome | Result


async def _result(output: FinalOutput, arguments: JsonObject, left: _Left) -> Result | Outcome:
    if left.results <= 0:
        return outcomes.failed(NOT_COMPARED)
    left.results -= 1
    left.calls -= 1
    return await output.read(arguments)


def _asked(part: ToolCallPart, sorted_out: _Sorted) -> AskedCall:
    match sorted_out.verdict:
        case CallRef() as ref:
            made, ask = ref, None
        case Waiting(ask=ask, ref=ref):
            made = ref
        case _:
            made, ask = None, None
    return AskedCall(call_id=part.tool_call_id, tool=part.tool_name, input=sorted_out.arguments, ref=made, ask=ask)


def _with_result(
    calls: list[AskedCall], refused: dict[str, Outcome], results: Sequence[tuple[AskedCall, Result]]
) -> RequestedCalls:
    if not results:
        return RequestedCalls(tuple(calls), refused)
    if any(call.ask for call in calls):
        handed = {call.call_id for call, _ in results}
        return RequestedCalls(tuple(calls), {**refused, **dict.fromkeys(handed, outcomes.failed(TOO_EARLY))})
    # The first one counts. What was tried beside it leaves history with it: no outcome may stay without its call.
    others = tuple(call for call in calls if call.tool != FINAL_OUTPUT)
    kept = {call.call_id: refused[call.call_id] for call in others if call.call_id in refused}
    return RequestedCalls(others, kept, results[0][1])


def _arguments(part: ToolCallPart, left: _Left) -> JsonObject:
    """Strictly as JSON says: what comes out can be written again, by whatever writes it."""
    try:
        text = part.args or "{}" if isinstance(part.args, str | None) else to_json(part.args, inf_nan_mode="constants")
        if len(text) > left.size:
            raise InvalidArguments(f"Invalid arguments for {part.tool_name}: too large. {_TOO_LARGE}")
        left.size -= len(text)
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
    """Records (the one that ends the step first), events, and what becomes of the session."""

    records: Sequence[NewRecord] = ()
    events: Sequence[NewEvent] = ()
    close: bool = False
    change: SessionChange | None = None
    opens: Sequence[InputRequest] = ()

    @property
    def ended(self) -> str | None:
        """How the turn ended with this, if it did."""
        if self.opens:
            return "parked"
        types = {event.type for event in self.events}
        if EventType.TURN_FAILED in types:
            return "failed"
        if EventType.TURN_CANCELLED in types:
            return "cancelled"
        return "completed" if EventType.TURN_COMPLETED in types else None

    @property
    def counted(self) -> SessionChange | None:
        """The change of the session, with the calls that have come to their result."""
        return self.change and replace(self.change, tool_calls=results_in(self.events))

    def changing(self, first: SessionChange) -> SessionChange:
        """This change on top of another one, in one commit."""
        mine = self.change
        return replace(mine, turns=first.turns) if mine else first


@dataclass(frozen=True)
class ModelAnswer:
    """What the model has said, and what it cost."""

    response: ModelResponse
    reason: FinishReason
    usage: Usage
    wanted: RequestedCalls
    #: Whom it has listened to.
    speaker: Principal | None


def settle_reply(facts: EventFactory, mode: Mode, answered: ModelAnswer) -> Settlement:
    """The turn ends with this reply, or parks, or goes on."""
    told = (*_told(facts, answered.response, answered.reason), *answered.wanted.events(facts))
    if answered.wanted.parks:
        return _parked(facts, answered, told)
    if answered.wanted.result:
        return _handed_over(facts, mode, answered, told)
    if answered.wanted.calls:
        # The turn goes on, even if no call can be made: the model is told why, and answers that.
        return Settlement(_records(facts, answered), told, change=_change(answered))
    over = facts.completed(mode, facts.step_completed(answered.reason, answered.usage))
    return _ended(facts, answered, told, over)


def settle_unfulfilled(facts: EventFactory, mode: Mode, answered: ModelAnswer) -> Settlement:
    """The turn ends because the model has not handed over what was asked of it; what it said is kept."""
    told = (*_told(facts, answered.response, answered.reason), *answered.wanted.events(facts))
    over = (*told, facts.step_completed(answered.reason, answered.usage))
    return _ended(facts, answered, over, facts.failed(mode, NOT_FULFILLED), failure=NOT_FULFILLED)


def settle_cancelled(facts: EventFactory, mode: Mode, answered: ModelAnswer) -> Settlement:
    """The turn was stopped while the model spoke: what it said is kept, and nothing that it asks for is done."""
    unmade = {
        call.call_id: cancelled_before(call)
        for call in answered.wanted.calls
        if call.call_id not in answered.wanted.refused
    }
    kept = replace(answered, wanted=replace(answered.wanted, refused={**answered.wanted.refused, **unmade}))
    told = (*_told(facts, answered.response, answered.reason), facts.step_completed(answered.reason, answered.usage))
    return _ended(facts, kept, told, facts.cancelled(mode, CANCELLED), failure=CANCELLED)


def settle_result(facts: EventFactory, mode: Mode, result: Result) -> Settlement:
    """The calls that came with a result have ended: now it counts. `facts` are of the step that handed it over."""
    said = ModelResponse(parts=[])
    stored = StoredReply(response=dump_response(as_answer(said, result)), finish_reason="stop", usage=Usage())
    record = written(facts.at.turn, facts.at.step + 1, REPLY, REPLY_FORMAT, stored)
    ending = facts.completed(mode, facts.result_completed(result.value))
    return Settlement((record,), ending.events, ending.closes, ending.change())


def _parked(facts: EventFactory, answered: ModelAnswer, told: Sequence[NewEvent]) -> Settlement:
    requests = answered.wanted.requests
    asked = (facts.step_completed(answered.reason, answered.usage), facts.inputs_requested(requests))
    ending = facts.parked()
    records = _records(facts, answered, parked=True)
    return Settlement(records, (*told, *asked, *ending.events), opens=requests, change=_change(answered, ending))


def _handed_over(facts: EventFactory, mode: Mode, answered: ModelAnswer, told: Sequence[NewEvent]) -> Settlement:
    result = answered.wanted.result
    assert result is not None
    if answered.wanted.calls:
        rest = replace(answered, response=without_final(answered.response))
        return Settlement(_records(facts, rest, result=result), told, change=_change(answered))
    last = (facts.step_completed(answered.reason, answered.usage), facts.result_completed(result.value))
    kept = replace(answered, response=as_answer(answered.response, result))
    return _ended(facts, kept, told, facts.completed(mode, *last))


def _ended(
    facts: EventFactory, answered: ModelAnswer, told: Sequence[NewEvent], ending: Ending, **more: Failure
) -> Settlement:
    records = _records(facts, answered, **more)
    return Settlement(records, (*told, *ending.events), ending.closes, change=_change(answered, ending))


def _records(facts: EventFactory, answered: ModelAnswer, **more: Any) -> tuple[NewRecord, ...]:
    stored = StoredReply(
        response=dump_response(answered.response),
        finish_reason=answered.reason,
        usage=answered.usage,
        calls=answered.wanted.calls,
        parallel=answered.wanted.parallel,
        speaker=answered.speaker,
        **more,
    )
    record = written(facts.at.turn, facts.at.step, REPLY, REPLY_FORMAT, stored)
    return (record, *answered.wanted.records(facts.at))


def _change(answered: ModelAnswer, ending: Ending | None = None) -> SessionChange:
    counts: dict[str, Any] = {"steps": 1, "usage": answered.usage}
    return ending.change(**counts) if ending else SessionChange(**counts)


def settle_failure(facts: EventFactory, mode: Mode, failure: Failure, usage: Usage) -> Settlement:
    at = facts.at
    record = written(at.turn, at.step, REPLY, FAILURE, StoredFailure(failure=failure, usage=usage))
    ending = facts.failed(mode, failure)
    return Settlement((record,), ending.events, ending.closes, ending.change(usage=usage))


def settle_stopped(facts: EventFactory, mode: Mode, usage: Usage) -> Settlement:
    """The turn was stopped while it failed: what it has cost is told."""
    at = facts.at
    record = written(at.turn, at.step, REPLY, FAILURE, StoredFailure(failure=CANCELLED, usage=usage))
    ending = facts.cancelled(mode, CANCELLED)
    told = facts.step_completed("error", usage)
    return Settlement((record,), (told, *ending.events), ending.closes, ending.change(usage=usage))


def _told(facts: EventFactory, response: ModelResponse, reason: FinishReason) -> tuple[NewEvent, ...]:
    """Reasoning and text of the step, each whole and each once."""
    reasoning = "".join(part.content for part in response.parts if isinstance(part, ThinkingPart))
    text = "".join(part.content for part in response.parts if isinstance(part, TextPart))
    events: list[NewEvent] = []
    if reasoning.strip():
        events.append(facts.of_step(EventType.REASONING_COMPLETED, "reasoning", {"reasoning": reasoning}))
    if text.strip():
        told = {"message": text, "finishReason": reason}
        events.append(facts.of_step(EventType.MESSAGE_COMPLETED, "message", told))
    return tuple(events)
