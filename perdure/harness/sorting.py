"""What a reply asks for: calls that run, calls that wait for people, calls that are refused, and a result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_core import from_json, to_json

from perdure.agents.agent import FINAL_OUTPUT, Limits
from perdure.agents.approval import Call
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import outcome_slot
from perdure.protocol.requests import CallRef, Coordinates
from perdure.protocol.wire import DEEPEST, JsonObject, deeper_than
from perdure.settings import Settings
from perdure.store.values import NewRecord

from . import outputs
from .calls import summary
from .facts import Facts
from .final_output import NOT_COMPARED, TOO_EARLY, TRIES, FinalOutput
from .gates import Gatekeeper
from .journal import OUTCOME, Ask, AskedCall, Outcome, Result, written
from .offer import Offer
from .questions import ASK_QUESTION, read_question
from .toolbox import InvalidArguments, Usable

#: Tries that the engine has for a call whose worker died, beside the tool's own retries: as many as for a model call.
_ATTEMPTS = 10

#: Characters of arguments, all calls of a reply together: far more than models write. While arguments are read and
#: compared with their types nobody else is served.
_LARGEST = 1_048_576
_TOO_LARGE = f"The calls of one reply have at most {_LARGEST} characters of arguments together."


@dataclass(frozen=True)
class Asked:
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

    def events(self, facts: Facts) -> tuple[NewEvent, ...]:
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
class Sorter:
    """Sorts the calls of one step."""

    offer: Offer
    gates: Gatekeeper
    settings: Settings
    limits: Limits

    async def sort(self, response: ModelResponse) -> Asked:
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
            return _Sorted(arguments, outputs.failed(str(invalid)))

    async def _judged(self, part: ToolCallPart, arguments: JsonObject, left: "_Left") -> "_Sorted":
        name = part.tool_name
        call = Call(id=part.tool_call_id, tool=name, arguments=arguments)
        if left.calls <= 0:
            return _Sorted(arguments, outputs.too_many(self.limits.calls_per_step))
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
        return outputs.failed(NOT_COMPARED)
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
) -> Asked:
    if not results:
        return Asked(tuple(calls), refused)
    if any(call.ask for call in calls):
        handed = {call.call_id for call, _ in results}
        return Asked(tuple(calls), {**refused, **dict.fromkeys(handed, outputs.failed(TOO_EARLY))})
    # The first one counts. What was tried beside it leaves history with it: no outcome may stay without its call.
    others = tuple(call for call in calls if call.tool != FINAL_OUTPUT)
    kept = {call.call_id: refused[call.call_id] for call in others if call.call_id in refused}
    return Asked(others, kept, results[0][1])


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
