"""What people's answers come to, all together. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.errors import UnreadableState
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import outcome_slot
from perdure.protocol.principals import Principal
from perdure.protocol.requests import ApprovedCall, CallRef, Coordinates, Failure, Resumed, ResumeTurn
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import resolved
from perdure.store.values import InputRow, NewRecord

from . import outputs, questions
from .facts import Ending, Facts
from .journal import OUTCOME, Outcome, written
from .turn_journal import TurnJournal
from .verdicts import failing, without_run

_TURN_FAILED = "Another request of this turn expired, and the turn failed with it; the call was not executed."


@dataclass
class Carried:
    """What the commit of a resumed turn writes, beside its beginning."""

    resumed: Resumed = field(default_factory=Resumed)
    records: list[NewRecord] = field(default_factory=list[NewRecord])
    events: list[NewEvent] = field(default_factory=list[NewEvent])
    #: Approvals that hold for the rest of the session.
    remembers: list[InputRow] = field(default_factory=list[InputRow])
    withdrawn: dict[str, NewEvent] = field(default_factory=dict[str, NewEvent])
    ending: Ending | None = None
    speaker: Principal | None = None
    output_schema: JsonObject | None = None


def carried_out(
    facts: Facts, resumption: ResumeTurn, rows: Mapping[str, InputRow], asking: Mapping[int, TurnJournal]
) -> Carried:
    carried = Carried()
    for turn in asking.values():
        carried.speaker = turn.principal or carried.speaker
        carried.output_schema = turn.output_schema or carried.output_schema
    failure = next((found for row in rows.values() if (found := failing(row))), None)
    if failure:
        _fail(carried, facts, resumption, rows, failure)
        return carried
    calls: list[ApprovedCall] = []
    for row in rows.values():
        request = row.request
        if row.status == "open":
            continue
        if outcome := without_run(row):
            settle(carried.records, carried.events, facts, request, outcome)
            continue
        if request.remember and row.status == "answered":
            carried.remembers.append(row)
        calls.append(ApprovedCall(at=place_of(request), call=_ref(request, asking[request.turn])))
    left = tuple(each for each in resumption.open if rows[each.request_id].status == "open")
    carried.resumed = Resumed(calls=tuple(calls), open=left)
    return carried


def settle(
    records: list[NewRecord], events: list[NewEvent], facts: Facts, request: InputRequest, outcome: Outcome
) -> None:
    """The outcome stands with the step that asked, and is told where the session is now. Questions are no actions."""
    records.append(written(request.turn, request.step, outcome_slot(request.call_id), OUTCOME, outcome))
    if request.kind == "approval":
        events.append(facts.action_result(request.call_id, request.tool, outcome, place_of(request)))


def place_of(request: InputRequest) -> Coordinates:
    return Coordinates(session_id=request.session_id, turn=request.turn, step=request.step)


def note_of(request: InputRequest | None) -> str:
    """What the model is told of an answer to a request that was closed before, or never made."""
    if request is None:
        return "An answer arrived for a request that this session never made. It changed nothing."
    asked = f"the question {request.prompt!r}" if request.kind == "question" else f"the call of {request.tool}"
    return f"An answer about {asked} arrived after that request was closed. It changed nothing."


def _fail(
    carried: Carried, facts: Facts, resumption: ResumeTurn, rows: Mapping[str, InputRow], failure: Failure
) -> None:
    """Nothing of the batch is carried out any more."""
    for row in rows.values():
        request = row.request
        settle(carried.records, carried.events, facts, request, _given_up(row))
        if row.status == "open":
            carried.withdrawn[request.request_id] = resolved(request, "withdrawn", None)
    carried.ending = facts.turn_failed(resumption.mode, failure)
    carried.resumed = Resumed(failure=failure)


def _given_up(row: InputRow) -> Outcome:
    if row.request.kind == "question":
        return without_run(row) or questions.ignored()
    if row.status == "open":
        return outputs.failed(_TURN_FAILED, outputs.DENIED, "rejected")
    return without_run(row) or outputs.failed(_TURN_FAILED, outputs.DENIED, "rejected")


def _ref(request: InputRequest, turn: TurnJournal) -> CallRef:
    reply = turn.reply(request.step)
    ref = reply.call(request.call_id).ref if reply else None
    if ref is None:
        raise UnreadableState(f"The records of turn {request.turn} do not hold the call {request.call_id!r}.")
    return ref
