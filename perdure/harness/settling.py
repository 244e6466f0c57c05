"""What the last commit of a model call writes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart

from perdure.protocol.deliveries import Mode
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage
from perdure.protocol.names import REPLY
from perdure.protocol.requests import Failure
from perdure.store.base import NewRecord, SessionChange

from .calls import Asked
from .facts import Facts
from .journal import FAILURE, StoredFailure, StoredReply, dump_response, written
from .journal import REPLY as REPLY_FORMAT


@dataclass(frozen=True)
class Settlement:
    """Records (the one that ends the step first), events, and what becomes of the session."""

    records: Sequence[NewRecord] = ()
    events: Sequence[NewEvent] = ()
    close: bool = False
    change: SessionChange | None = None

    @property
    def ended(self) -> str | None:
        """How the turn ended with this, if it did."""
        types = {event.type for event in self.events}
        if EventType.TURN_FAILED in types:
            return "failed"
        return "completed" if EventType.TURN_COMPLETED in types else None

    def changing(self, first: SessionChange) -> SessionChange:
        """This change on top of another one, in one commit."""
        mine = self.change
        return replace(mine, turns=first.turns) if mine else first


def settle_reply(
    facts: Facts, mode: Mode, response: ModelResponse, reason: FinishReason, usage: Usage, wanted: Asked
) -> Settlement:
    at = facts.at
    stored = StoredReply(response=dump_response(response), finish_reason=reason, usage=usage, calls=wanted.calls)
    records = (written(at.turn, at.step, REPLY, REPLY_FORMAT, stored), *wanted.refused)
    told = _told(facts, response, reason)
    if wanted.calls:
        # The turn goes on, even if no call can be made: the model is told why, and answers that.
        return Settlement(records, (*told, *wanted.requested(facts)), change=SessionChange(steps=1, usage=usage))
    ending = facts.completed(mode, reason, usage)
    return Settlement(records, (*told, *ending.events), ending.closes, ending.change(steps=1, usage=usage))


def settle_failure(facts: Facts, mode: Mode, failure: Failure, usage: Usage) -> Settlement:
    at = facts.at
    record = written(at.turn, at.step, REPLY, FAILURE, StoredFailure(failure=failure, usage=usage))
    ending = facts.failed(mode, failure)
    return Settlement((record,), ending.events, ending.closes, ending.change(usage=usage))


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
