"""Calls that have no outcome when their turn ends from outside: each gets a truthful one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import intent_slot, outcome_slot
from perdure.protocol.requests import Conclusion, Coordinates
from perdure.session.inputs import resolved
from perdure.store.values import NewRecord

from . import outputs, questions
from .facts import Facts
from .journal import OUTCOME, AskedCall, Outcome, written
from .prompt import INTERRUPTED, NOT_EXECUTED
from .turn_journal import TurnJournal

_CANCELLED = "This call was cancelled before it was executed."


@dataclass(frozen=True)
class LooseEnd:
    """A call without an outcome, and the step that asked for it."""

    at: Coordinates
    call: AskedCall
    #: Whether somebody was about to run it.
    begun: bool

    @property
    def request(self) -> InputRequest | None:
        return self.call.ask.request if self.call.ask else None

    @property
    def intent(self) -> tuple[int, int, str]:
        """The key of the record that says that somebody is about to run it."""
        return self.at.turn, self.at.step, intent_slot(self.call.call_id)

    def outcome(self, kind: str) -> Outcome:
        if self.begun:
            return outputs.failed(INTERRUPTED, outputs.UNKNOWN, "unknown")
        if kind == "cancelled":
            return cancelled_before(self.call)
        if self.request and self.request.kind == "question":
            return questions.ignored()
        if self.request:
            return outputs.failed(NOT_EXECUTED, outputs.DENIED, "rejected")
        return outputs.failed(NOT_EXECUTED, outputs.UNKNOWN, "unknown")


def cancelled_before(call: AskedCall) -> Outcome:
    """What a call comes to when its turn is stopped before the call has begun."""
    if call.ask is None:
        return outputs.failed(_CANCELLED, outputs.CANCELLED)
    if call.ask.request.kind == "question":
        return questions.ignored()
    return outputs.failed(_CANCELLED, outputs.DENIED, "rejected")


def loose_ends(session_id: str, turns: Sequence[tuple[int, TurnJournal]]) -> tuple[LooseEnd, ...]:
    return tuple(
        LooseEnd(
            at=Coordinates(session_id=session_id, turn=number, step=step),
            call=call,
            begun=turn.interrupted(step, call.call_id),
        )
        for number, turn in turns
        for step in range(turn.last_step + 1)
        for call in _calls(turn, step)
        if turn.outcome(step, call.call_id) is None
    )


def _calls(turn: TurnJournal, step: int) -> Sequence[AskedCall]:
    reply = turn.reply(step)
    return reply.calls if reply else ()


def tied(
    facts: Facts, conclusion: Conclusion, ends: Sequence[LooseEnd]
) -> tuple[tuple[NewRecord, ...], tuple[NewEvent, ...]]:
    """Their outcomes, told where the session is now, so that no late attempt can still have another one."""
    records: list[NewRecord] = []
    events: list[NewEvent] = []
    for end in ends:
        outcome = end.outcome(conclusion.kind)
        call_id = end.call.call_id
        records.append(written(end.at.turn, end.at.step, outcome_slot(call_id), OUTCOME, outcome))
        if end.call.ref:
            events.append(facts.action_result(call_id, end.call.tool, outcome, end.at))
    return tuple(records), tuple(events)


def withdrawals(ends: Sequence[LooseEnd]) -> dict[str, NewEvent]:
    """What readers are told of the requests that nobody needs to answer any more."""
    requests = [end.request for end in ends if end.request]
    return {request.request_id: resolved(request, "withdrawn", None) for request in requests}
