"""What a closed request comes to. Pure."""

from perdure.protocol.inputs import InputAnswer, InputRequest, digest
from perdure.protocol.requests import Failure
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import CONTINUED
from perdure.store.values import InputRow

from . import outputs, questions
from .journal import Outcome

MISMATCH = "TOOL_APPROVAL_MISMATCH"
WITHDRAWN = "The request was withdrawn before anybody answered; the call was not executed."
_CHANGED = "These are not the arguments that were approved; the call was not executed."
_UNASKED = "Nobody has approved this call; it was not executed."


def without_run(row: InputRow) -> Outcome | None:
    """What a closed request comes to when its call is not run; None: it may run."""
    if row.request.kind == "question":
        answer = row.answer
        says = row.status == "answered" and answer and (answer.option_id is not None or answer.text is not None)
        return questions.answered(answer) if answer and says else questions.ignored()
    if row.status == "withdrawn" or row.answer is None:
        return outputs.failed(WITHDRAWN, outputs.DENIED, "rejected")
    if not row.answer.approves:
        return (
            outputs.ignored()
            if row.answer.reason == CONTINUED
            else outputs.denied(row.answer.reason or row.answer.text)
        )
    return _mismatch(row.request, row.answer, arguments_of(row.request, row.answer))


def guarded(row: InputRow | None, arguments: JsonObject) -> Outcome | None:
    """Why a call that had to be approved must not run with these arguments; None: it may."""
    if row is None or row.answer is None or row.status not in ("answered", "expired") or not row.answer.approves:
        return outputs.failed(_UNASKED, outputs.DENIED, "rejected")
    return _mismatch(row.request, row.answer, arguments)


def arguments_of(request: InputRequest, answer: InputAnswer | None) -> JsonObject:
    """The arguments that were approved: the model's, or what the approver made of them."""
    return request.input if answer is None or answer.arguments is None else answer.arguments


def failing(row: InputRow) -> Failure | None:
    """What the turn fails with because nobody has answered, if that was declared."""
    if row.status != "expired" or row.request.on_expiry != "fail":
        return None
    return Failure(
        code="INPUT_EXPIRED",
        message=f"Nobody has answered in time: {row.request.prompt}",
        details={"requestId": row.request.request_id, "callId": row.request.call_id, "toolName": row.request.tool},
    )


def _mismatch(request: InputRequest, answer: InputAnswer, arguments: JsonObject) -> Outcome | None:
    # Changed arguments are approved by their own digest; unchanged ones by that of the request.
    approved = request.digest if answer.arguments is None else answer.digest
    if digest(arguments) == approved:
        return None
    return outputs.failed(_CHANGED, MISMATCH, "rejected")
