"""What a reply asks for: calls that run, calls that wait for people, calls that are refused, and a result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.agents.agent import FINAL_OUTPUT
from perdure.agents.approval import Call
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import outcome_slot
from perdure.protocol.requests import CallRef, Coordinates
from perdure.protocol.wire import JsonObject
from perdure.settings import Settings
from perdure.store.base import NewRecord

from . import outputs
from .calls import summary
from .facts import Facts
from .final_output import TOO_EARLY
from .gates import Gatekeeper
from .journal import OUTCOME, Ask, AskedCall, Outcome, Result, written
from .offer import Offer
from .questions import ASK_QUESTION, read_question
from .toolbox import InvalidArguments, Usable

#: Tries that the engine has for a call whose worker died, beside the tool's own retries.
_ATTEMPTS = 6


@dataclass(frozen=True)
class Asked:
    """The calls of one reply, sorted."""

    calls: tuple[AskedCall, ...] = ()
    #: Of the calls that are not run at all.
    refused: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    #: The result that was handed over; then it is not among the calls.
    result: Result | None = None

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
        """The actions that begin, and those that were refused for reasons other than the model's mistakes."""
        actions = [
            {"kind": "tool-call", "callId": call.call_id, "toolName": call.tool, "input": call.input}
            for call in self.runs
        ]
        begun = (facts.of_step(EventType.ACTIONS_REQUESTED, "actions", {"actions": actions}),) if actions else ()
        rejected = [
            facts.action_result(call.call_id, call.tool, outcome)
            for call in self.calls
            if (outcome := self.refused.get(call.call_id)) and outcome.status == "rejected"
        ]
        return (*begun, *rejected)


@dataclass(frozen=True)
class Sorter:
    """Sorts the calls of one step."""

    offer: Offer
    gates: Gatekeeper
    settings: Settings

    async def sort(self, response: ModelResponse) -> Asked:
        calls: list[AskedCall] = []
        refused: dict[str, Outcome] = {}
        results: list[tuple[AskedCall, Result]] = []
        for part in response.tool_calls:
            sorted_out = await self._sorted(part)
            call = _asked(part, sorted_out)
            match sorted_out.verdict:
                case Outcome() as refusal:
                    refused[call.call_id] = refusal
                case Result() as result:
                    results.append((call, result))
                case _:
                    pass
            calls.append(call)
        return _with_result(calls, refused, results)

    async def _sorted(self, part: ToolCallPart) -> "_Sorted":
        arguments: JsonObject = {}
        try:
            arguments = _arguments(part)
            return _Sorted(arguments, await self._verdict(part, arguments))
        except InvalidArguments as invalid:
            # Readers see no arguments that are none.
            known = arguments if part.tool_name not in self.offer.tools else {}
            return _Sorted(known, outputs.failed(str(invalid)))

    async def _verdict(self, part: ToolCallPart, arguments: JsonObject) -> "CallRef | Waiting | Outcome | Result":
        name = part.tool_name
        call = Call(id=part.tool_call_id, tool=name, arguments=arguments)
        if name == FINAL_OUTPUT and self.offer.output:
            return self.offer.output.read(arguments)
        if name == ASK_QUESTION and self.offer.asks:
            return Waiting(self.gates.question(call, read_question(arguments)))
        tool = self.offer.tools.get(name)
        if tool is None:
            known = ", ".join(self.offer.names) or "none"
            raise InvalidArguments(f"Unknown tool {name!r}. Tools that exist: {known}.")
        tool.check(arguments)
        ref = self._ref(call, tool)
        match await self.gates.approval(call, tool.gate):
            case None:
                return ref
            case Ask() as ask:
                return Waiting(ask, ref)
            case Outcome() as refusal:
                return refusal

    def _ref(self, call: Call, tool: Usable) -> CallRef:
        return CallRef(
            call_id=call.id,
            tool=call.tool,
            summary=summary(call.tool, call.arguments) if self.settings.ui_detail == "on" else "",
            timeout=tool.timeout,
            heartbeat=self.settings.heartbeat_timeout,
            attempts=_ATTEMPTS + tool.retries,
        )


@dataclass(frozen=True)
class Waiting:
    """A call that waits for people; a question has nothing to run afterwards."""

    ask: Ask
    ref: CallRef | None = None


@dataclass(frozen=True)
class _Sorted:
    arguments: JsonObject
    verdict: CallRef | Waiting | Outcome | Result


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
    handed = {call.call_id for call, _ in results}
    if not any(call.ask for call in calls):
        # The first one counts.
        return Asked(tuple(call for call in calls if call.call_id not in handed), refused, results[0][1])
    return Asked(tuple(calls), {**refused, **dict.fromkeys(handed, outputs.failed(TOO_EARLY))})


def _arguments(part: ToolCallPart) -> JsonObject:
    try:
        arguments: object = json.loads(part.args or "{}") if isinstance(part.args, str | None) else part.args
    except ValueError as broken:
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not JSON ({broken}).") from None
    if not isinstance(arguments, dict):
        raise InvalidArguments(f"Invalid arguments for {part.tool_name}: not a JSON object.")
    return {str(key): value for key, value in arguments.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
