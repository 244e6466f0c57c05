"""What the last commit of a model call writes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart

from perdure.protocol.deliveries import Mode
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import REPLY
from perdure.protocol.principals import Principal
from perdure.protocol.requests import Failure
from perdure.session.turn import CANCELLED
from perdure.store.values import NewRecord, SessionChange

from .facts import Ending, Facts, results_in
from .final_output import NOT_FULFILLED, as_answer, without_final
from .journal import FAILURE, Result, StoredFailure, StoredReply, dump_response, written
from .journal import REPLY as REPLY_FORMAT
from .loose_ends import cancelled_before
from .sorting import Asked


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
class Answered:
    """What the model has said, and what it cost."""

    response: ModelResponse
    reason: FinishReason
    usage: Usage
    wanted: Asked
    #: Whom it has listened to.
    speaker: Principal | None


def settle_reply(facts: Facts, mode: Mode, answered: Answered) -> Settlement:
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


def settle_unfulfilled(facts: Facts, mode: Mode, answered: Answered) -> Settlement:
    """The turn ends because the model has not handed over what was asked of it; what it said is kept."""
    told = (*_told(facts, answered.response, answered.reason), *answered.wanted.events(facts))
    over = (*told, facts.step_completed(answered.reason, answered.usage))
    return _ended(facts, answered, over, facts.failed(mode, NOT_FULFILLED), failure=NOT_FULFILLED)


def settle_cancelled(facts: Facts, mode: Mode, answered: Answered) -> Settlement:
    """The turn was stopped while the model spoke: what it said is kept, and nothing that it asks for is done."""
    unmade = {
        call.call_id: cancelled_before(call)
        for call in answered.wanted.calls
        if call.call_id not in answered.wanted.refused
    }
    kept = replace(answered, wanted=replace(answered.wanted, refused={**answered.wanted.refused, **unmade}))
    told = (*_told(facts, answered.response, answered.reason), facts.step_completed(answered.reason, answered.usage))
    return _ended(facts, kept, told, facts.cancelled(mode, CANCELLED), failure=CANCELLED)


def settle_result(facts: Facts, mode: Mode, result: Result) -> Settlement:
    """The calls that came with a result have ended: now it counts. `facts` are of the step that handed it over."""
    said = ModelResponse(parts=[])
    stored = StoredReply(response=dump_response(as_answer(said, result)), finish_reason="stop", usage=Usage())
    record = written(facts.at.turn, facts.at.step + 1, REPLY, REPLY_FORMAT, stored)
    ending = facts.completed(mode, facts.result_completed(result.value))
    return Settlement((record,), ending.events, ending.closes, ending.change())


def _parked(facts: Facts, answered: Answered, told: Sequence[NewEvent]) -> Settlement:
    requests = answered.wanted.requests
    asked = (facts.step_completed(answered.reason, answered.usage), facts.inputs_requested(requests))
    ending = facts.parked()
    records = _records(facts, answered, parked=True)
    return Settlement(records, (*told, *asked, *ending.events), opens=requests, change=_change(answered, ending))


def _handed_over(facts: Facts, mode: Mode, answered: Answered, told: Sequence[NewEvent]) -> Settlement:
    result = answered.wanted.result
    assert result is not None
    if answered.wanted.calls:
        rest = replace(answered, response=without_final(answered.response))
        return Settlement(_records(facts, rest, result=result), told, change=_change(answered))
    last = (facts.step_completed(answered.reason, answered.usage), facts.result_completed(result.value))
    kept = replace(answered, response=as_answer(answered.response, result))
    return _ended(facts, kept, told, facts.completed(mode, *last))


def _ended(facts: Facts, answered: Answered, told: Sequence[NewEvent], ending: Ending, **more: Failure) -> Settlement:
    records = _records(facts, answered, **more)
    return Settlement(records, (*told, *ending.events), ending.closes, change=_change(answered, ending))


def _records(facts: Facts, answered: Answered, **more: Any) -> tuple[NewRecord, ...]:
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


def _change(answered: Answered, ending: Ending | None = None) -> SessionChange:
    counts: dict[str, Any] = {"steps": 1, "usage": answered.usage}
    return ending.change(**counts) if ending else SessionChange(**counts)


def settle_failure(facts: Facts, mode: Mode, failure: Failure, usage: Usage) -> Settlement:
    at = facts.at
    record = written(at.turn, at.step, REPLY, FAILURE, StoredFailure(failure=failure, usage=usage))
    ending = facts.failed(mode, failure)
    return Settlement((record,), ending.events, ending.closes, ending.change(usage=usage))


def settle_stopped(facts: Facts, mode: Mode, usage: Usage) -> Settlement:
    """The turn was stopped while it failed: what it has cost is told."""
    at = facts.at
    record = written(at.turn, at.step, REPLY, FAILURE, StoredFailure(failure=CANCELLED, usage=usage))
    ending = facts.cancelled(mode, CANCELLED)
    told = facts.step_completed("error", usage)
    return Settlement((record,), (told, *ending.events), ending.closes, ending.change(usage=usage))


def _told(facts: Facts, response: ModelResponse, reason: FinishReason) -> tuple[NewEvent, ...]:
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
